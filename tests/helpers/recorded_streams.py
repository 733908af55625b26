"""Records what a pipeline issues to the streams of several CUDA devices, without CUDA.

Tensors stay on the CPU, and what is issued is computed at once. The package's own CUDA streams work
on stand-ins for torch's streams and events, which note what they order. The record is a graph.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import extract_stack

import torch
from cuda_calls import CountedEvent, CountedLane, CountedStream, stood_in
from torch.overrides import TorchFunctionMode

import spectrain_ext as st
from spectrain_ext.transport import Stream

from .checked_streams import checked_streams


@dataclass(eq=False)
class Work:
    """What was issued inside one ``stream.using(...)``.

    Attributes:
        number: in the order of issue.
        step: stage, kind of step, minibatch and microbatch; None: outside of the steps.
        lane: the torch stream on which it runs.
        reads, writes: names of buffers.
        after: the works that streams, events and the CPU order directly before it.
        conflicts: works that used the same buffer before, with "RAW", "WAR" or "WAW" and its name.
    """

    number: int
    step: tuple | None
    lane: Lane
    reads: list[str]
    writes: list[str]
    after: set[Work]
    conflicts: dict[Work, tuple[str, str]] = field(default_factory=dict)

    @property
    def by_caller(self):
        return self.lane.name == CALLERS

    def __repr__(self):
        return f"work {self.number} of {self.step}"


CALLERS = "the caller's stream"


class Lane(CountedLane):
    """Stands for a ``torch.cuda.Stream``. ``last``: what its next work comes after."""

    def __init__(self, device, name=""):
        super().__init__(device, name)
        self.last: frozenset[Work] = frozenset()
        self.conflicts: dict[Work, tuple[str, str]] = {}  # of its next work, besides its own

    def wait_event(self, event):
        super().wait_event(event)
        self.last |= event.last

    def synchronize(self):
        _now[-1].host_waits(self.last)


class LaneEvent(CountedEvent):
    """Stands for a ``torch.cuda.Event``."""

    last: frozenset[Work] = frozenset()

    def record(self, lane):
        super().record(lane)
        self.last = lane.last

    def synchronize(self):
        _now[-1].host_waits(self.last)


class RecordedStream(CountedStream):
    """The package's stream, which also notes who uses a buffer."""

    @contextmanager
    def using(self, *, reads=(), writes=()):
        using, lane = super().using(reads=reads, writes=writes), self.lane
        work, before = _now[-1].issued(lane, reads, writes), lane.last
        with using:
            yield
        assert before == lane.last, "a wait inside of a work"
        lane.last = frozenset({work})

    def copied(self, pairs, reads, writes):
        self.lane.last = frozenset({_now[-1].issued(self.lane, reads, writes)})
        super().copied(pairs, reads, writes)

    def reads(self, buffer):
        self._declare(reads=(buffer,))

    def writes(self, buffer):
        self._declare(writes=(buffer,))

    def _declare(self, **buffers):
        if self.lane.name == CALLERS:  # there may be work of the caller's
            self.lane.last = frozenset({_now[-1].issued(self.lane, **buffers)})
            return
        # Memory that whatever comes next may get.
        self.lane.conflicts |= _now[-1].conflicts(**buffers)


class Record:
    """The works of a run in the order of issue, and where the CPU waited for a device."""

    def __init__(self):
        self.works: list[Work] = []
        self.waits: list[tuple[tuple | None, str, frozenset[Work]]] = []  # step, function, for what
        self.step = None
        self.callers: list[Lane] = []
        self._host: frozenset[Work] = frozenset()  # what the CPU has waited for
        self._uses = {}  # by buffer: the last work that wrote it, and those that read it since

    def train(self, pipe, data, use=lambda result: None):
        """Train; forget what was before: a first run has allocated all buffers."""
        self.works, self.waits, self._host = [], [], frozenset()
        with _HostReads():
            for result in pipe.run(data, trace=_Steps(self)):
                use(result)

    def issued(self, lane, reads=(), writes=()):
        after = lane.last | self._host
        names = [[buffer.name for buffer in buffers] for buffers in (reads, writes)]
        work = Work(len(self.works), self.step, lane, *names, set(after))
        work.conflicts |= self.conflicts(reads, writes)
        work.conflicts |= lane.conflicts
        lane.conflicts = {}
        for buffer in reads:
            self._uses.setdefault(buffer, (None, []))[1].append(work)
        for buffer in writes:
            self._uses[buffer] = work, []
        self.works.append(work)
        return work

    def conflicts(self, reads=(), writes=()):
        found = {}
        for buffers, after_write, after_read in ((writes, "WAW", "WAR"), (reads, "RAW", "")):
            for buffer in buffers:
                written, read = self._uses.get(buffer, (None, ()))
                found |= {work: (after_read, buffer.name) for work in read if after_read}
                found |= {written: (after_write, buffer.name)} if written else {}
        return found

    def host_waits(self, works=None):
        """The CPU waits for these works, or for the caller's streams."""
        if works is None:
            works = frozenset().union(*(lane.last for lane in self.callers))
        inside = [
            frame.name
            for frame in extract_stack()
            if "/spectrain_ext/" in frame.filename and not frame.filename.endswith("streams.py")
        ]
        self.waits.append((self.step, inside[-1] if self.step else "the caller", works))
        self._host |= works

    # What the record orders.

    def order(self, before=lambda work: work.after):
        """Return for each work the set of all works before it, as the bits of a number."""
        order = {}
        for work in self.works:
            order[work] = 0
            for other in before(work):
                if other in order:
                    order[work] |= order[other] | 1 << other.number
        return order

    def times(self, duration, left_out=lambda earlier, later: False):
        """Return when each work begins and ends if each begins as soon as the order allows."""
        times = {}
        for work in self.works:
            earlier = [o for o in work.after if o in times and not left_out(o, work)]
            begin = max((times[other][1] for other in earlier), default=0)
            times[work] = begin, begin + duration(work)
        return times


class _Steps(st.Observer):
    """Notes which step runs."""

    def __init__(self, record):
        self._record = record

    def watch(self, run, handlers):
        def noting(kind, handler):
            def step(i, j):
                self._record.step = run.stage.index, kind, i, j
                handler(i, j)
                self._record.step = None

            return step

        return {kind: noting(kind, handler) for kind, handler in handlers.items()}


_READS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__"}


class _HostReads(TorchFunctionMode):
    """Notes reads of values by the CPU, which wait for a device if they are there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in _READS:
            _now[-1].host_waits()
        return function(*args, **(kwargs or {}))


_now: list[Record] = []  # the innermost one


@contextmanager
def recorded(devices, batches_on=None):
    """Inside, new pipelines take their stages to be on these CUDA devices; yield the record.

    ``batches_on``: the stage that shares its device with the caller's batches; None: the CPU.
    """
    places = [torch.device("cuda", device) for device in devices]
    lanes = {}
    record = Record()

    def lane(device, name=""):
        made = Lane(device, name)
        if name == CALLERS:
            lanes[device] = made
            record.callers.append(made)
        return made

    def callers(device):
        if device is not None and batches_on is None:
            return Stream()
        place = places[-1 if device is None else batches_on]
        return RecordedStream(lanes[place], own=False)

    with checked_streams(), stood_in(places, RecordedStream, lane, LaneEvent, callers):
        _now.append(record)
        try:
            yield record
        finally:
            _now.pop()
