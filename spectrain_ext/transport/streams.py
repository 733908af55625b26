"""Streams and events with one interface for CUDA, the CPU, and a CPU that checks their order."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from spectrain_ext.errors import OrderingError


class Buffer:
    """Memory that several streams use; checked streams record its last uses here."""

    __slots__ = ("name", "reads", "written")

    def __init__(self, name: str) -> None:
        self.name = name
        self.written: tuple[CheckedStream, int] | None = None
        self.reads: dict[CheckedStream, int] = {}


class Event(Protocol):
    """A point in a stream's work, set by ``Stream.record``."""

    def synchronize(self) -> None:
        """Block the CPU until the point is reached."""


class Stream:
    """A queue of work, which is issued inside ``with stream.using(...)``.

    Methods that a subclass does not need keep these defaults, which do nothing.
    """

    __slots__ = ()
    immediate = False  # whether work is done once it has been issued

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def using(
        self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> AbstractContextManager[object]:
        """Inside, this is the current stream of its devices, for work that uses these buffers."""
        return self

    def event(self) -> Event:
        """Return an event to record on this stream, repeatedly."""
        raise NotImplementedError

    def record(self, event: Event) -> None:
        """Set the event to the end of the work issued so far."""

    def wait(self, event: Event) -> None:
        """Order later work after the event; one that was never recorded has no effect."""

    def reads(self, buffer: Buffer) -> None:
        """Declare a read outside of ``using``, by the caller."""

    def writes(self, buffer: Buffer) -> None:
        """Declare a write outside of ``using``, by the caller, or that the memory is freed."""

    def may_read(self, buffer: Buffer) -> None:
        """Declare that work issued here from now on may read the buffer."""

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Do not reuse this memory, once freed, before the work issued so far is done."""

    def synchronize(self) -> None:
        """Block the CPU until the work issued so far is done."""

    def leave(self) -> None:
        """Stop being the current stream, if an exception bypassed the end of ``with``."""


class HostEvent:
    """An event of the CPU, whose work is done when the call returns."""

    __slots__ = ()

    def synchronize(self) -> None: ...


class HostStream(Stream):
    """The CPU as a stream: work is done as it is issued, and its order is not checked."""

    __slots__ = ()
    immediate = True

    def event(self) -> Event:
        return HostEvent()

    def wait(self, event: Event) -> None:
        if type(event) is not HostEvent:  # another device's; CPU work is done
            event.synchronize()


class CheckedEvent:
    """What a checked stream had seen of every stream when it recorded the event."""

    def __init__(self, done: _Clock) -> None:
        self.seen: _Clock = {}
        self._done = done

    def synchronize(self) -> None:
        _merge(self._done, self.seen)


class CheckedStream(Stream):
    """The CPU as a stream that checks that events order all uses (by vector clocks)."""

    def __init__(self, name: str, done: _Clock) -> None:
        self.name = name
        self._seen: _Clock = {self: 0}
        self.done = done  # what the CPU has waited for, shared by all streams

    @contextmanager
    def using(
        self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> Iterator[None]:
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
        # The uses end here: an event that was recorded inside does not cover them.
        for buffer in reads:
            buffer.reads[self] = self._tick()
        for buffer in writes:
            buffer.written = (self, self._tick())

    def event(self) -> CheckedEvent:
        return CheckedEvent(self.done)

    def record(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        event.seen = dict(self._seen)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        _merge(self._seen, event.seen)

    def reads(self, buffer: Buffer) -> None:
        self._check(buffer, "reads", "written", buffer.written)
        buffer.reads[self] = self._tick()

    def writes(self, buffer: Buffer) -> None:
        self._check(buffer, "writes", "written", buffer.written)
        for use in buffer.reads.items():
            self._check(buffer, "writes", "read", use)
        buffer.reads.clear()
        buffer.written = (self, self._tick())

    def may_read(self, buffer: Buffer) -> None:
        self._check(buffer, "may read", "written", buffer.written)

    def synchronize(self) -> None:
        _merge(self.done, self._seen)

    def _tick(self) -> int:
        self._seen[self] += 1
        return self._seen[self]

    def _check(
        self, buffer: Buffer, verb: str, earlier: str, use: tuple[CheckedStream, int] | None
    ) -> None:
        if use is None:
            return
        stream, time = use
        if max(self._seen.get(stream, 0), self.done.get(stream, 0)) < time:
            # On the CPU the result is right anyway, without events between the two uses.
            raise OrderingError(
                f"{self.name} {verb} {buffer.name} without waiting for {stream.name}, "
                f"which has {earlier} it"
            )


_Clock = dict[CheckedStream, int]


def _merge(clock: _Clock, other: _Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))


class CudaStream(Stream):
    """Streams of one or two CUDA devices that act as one."""

    def __init__(self, streams: list[torch.cuda.Stream]) -> None:
        # A copy between two devices runs on the source's current stream and waits for the target's:
        # both must belong to the copy, or it waits for other work of those devices.
        self._streams = streams
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for stream in self._streams:
            self._entered.enter_context(torch.cuda.stream(stream))

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def event(self) -> Event:
        event: Event = torch.cuda.Event()  # without timing, which is cheaper
        return event

    def record(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(self._streams[-1])  # the end of a copy reaches it too

    def wait(self, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):  # CPU work is done
            for stream in self._streams:
                stream.wait_event(event)

    def lend(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for stream in self._streams:
                tensor.record_stream(stream)

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def leave(self) -> None:
        self._entered.close()


_HOST = HostStream()
_checked: CheckedStream | None = None  # the caller's, inside ``checked_streams``
_current = threading.local()  # the checked stream whose ``using`` this thread is in


@contextmanager
def checked_streams() -> Iterator[None]:
    """Inside, new CPU streams raise OrderingError for a missing wait; use them only inside."""
    global _checked
    outer, _checked = _checked, CheckedStream("the caller's stream", {})
    try:
        yield
    finally:
        _checked = outer


def new_stream(name: str, *devices: torch.device) -> Stream:
    """Return a new stream for work on these devices; the CPU's if none of them is CUDA."""
    cuda = list(dict.fromkeys(device for device in devices if device.type == "cuda"))
    if cuda:
        return CudaStream([torch.cuda.Stream(device) for device in cuda])
    return _HOST if _checked is None else CheckedStream(name, _checked.done)


def callers_stream(device: torch.device) -> Stream:
    """Return the stream that the caller's work on the device is issued to."""
    if device.type == "cuda":
        return CudaStream([torch.cuda.current_stream(device)])
    return _HOST if _checked is None else getattr(_current, "stream", None) or _checked


def captured(device: torch.device) -> bool:
    """Whether the caller's work on the device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
