"""CPU streams that check the order of work: inner, because they stand for the CPU's own.

They raise an error, by vector clocks, for work that no point orders.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

from spectrain_ext.transport import DONE, Stream, streams


class OrderingError(RuntimeError):
    """A stream used a buffer without waiting for a conflicting use on another stream."""


class CheckedPoint:
    """What a checked stream had seen of every stream when it marked the point."""

    def __init__(self, seen, done):
        self.seen, self._done = seen, done

    def synchronize(self):
        _merge(self._done, self.seen)

    def fix(self): ...


class CheckedStream(Stream):
    """The CPU as a stream that checks that points order all uses of a buffer."""

    immediate = False

    def __init__(self, name, done):
        self.name = name
        self._seen = {self: 0}  # a clock: the time of every stream
        self.done = done  # what the CPU has waited for, shared by all streams

    @contextmanager
    def using(self, *, reads=(), writes=()):
        for buffer in reads:
            self.reads(buffer)
        for buffer in writes:
            self.writes(buffer)
        outer = getattr(_current, "stream", None)
        _current.stream = self
        try:
            yield
        finally:
            _current.stream = outer
        # The uses end here: a point that was marked inside does not cover them.
        for buffer in reads:
            _readers(buffer)[self] = self._tick()
        for buffer in writes:
            buffer.written = self, self._tick()

    def mark(self):
        return CheckedPoint(dict(self._seen), self.done)

    def wait(self, point):
        if point is not DONE:
            assert isinstance(point, CheckedPoint)
            _merge(self._seen, point.seen)

    def reads(self, buffer):
        self._check_written(buffer, "reads")
        _readers(buffer)[self] = self._tick()

    def writes(self, buffer):
        self._check_written(buffer, "writes")
        for stream, time in _readers(buffer).items():
            self._check(buffer, "writes", "read", stream, time)
        _readers(buffer).clear()
        buffer.written = self, self._tick()

    def may_read(self, buffer):
        self._check_written(buffer, "may read")

    def synchronize(self):
        _merge(self.done, self._seen)

    def _tick(self):
        self._seen[self] += 1
        return self._seen[self]

    def _check_written(self, buffer, verb):
        if hasattr(buffer, "written"):
            self._check(buffer, verb, "written", *buffer.written)

    def _check(self, buffer, verb, earlier, stream, time):
        if max(self._seen.get(stream, 0), self.done.get(stream, 0)) < time:
            # On the CPU the result is right anyway, without points between the two uses.
            raise OrderingError(
                f"{self.name} {verb} {buffer.name} without waiting for {stream.name}, "
                f"which has {earlier} it"
            )


def _readers(buffer):
    """Return the times at which streams have read a buffer since the last write."""
    return vars(buffer).setdefault("readers", {})


def _merge(clock, other):
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))


_current = threading.local()  # the checked stream whose ``using`` this thread is in


class CheckedStreams:
    """Stands for ``streams.cpu_stream``."""

    def __init__(self):
        self.caller = CheckedStream("the caller's stream", {})

    def __call__(self, name):
        if name is None:
            return getattr(_current, "stream", None) or self.caller
        return CheckedStream(name, self.caller.done)


@contextmanager
def checked_streams(cpu_stream=None):
    """Inside, new CPU streams raise OrderingError for a missing wait; use them only inside."""
    outer, streams.cpu_stream = streams.cpu_stream, cpu_stream or CheckedStreams()
    try:
        yield
    finally:
        streams.cpu_stream = outer


def another_caller():
    """Give the caller a new current stream that has not waited for any other."""
    checked = streams.cpu_stream
    checked.caller = CheckedStream("another stream of the caller's", checked.caller.done)
