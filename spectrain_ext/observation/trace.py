"""Trace: records when every action of a run really ran."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from spectrain_ext.pipeline.observer import Handler, Observer
from spectrain_ext.schedule import Action, Kind, Lane, Rules, Span, open_ledgers
from spectrain_ext.transport import CudaStream, Stream

if TYPE_CHECKING:
    from spectrain_ext.pipeline.stage import Stage

Mark = float | torch.cuda.Event

_LANES: dict[Kind, Lane] = {
    Kind.LOAD_FORWARD: "compute",
    Kind.FORWARD: "compute",
    Kind.LOSS: "compute",
    Kind.LOAD_BACKWARD: "compute",
    Kind.BACKWARD: "compute",
    Kind.UPDATE: "compute",
    Kind.SEND_ACTIVATION: "to next",
    Kind.SEND_GRADIENT: "to previous",
}
_TURNS = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE))


class Trace(Observer):
    """Give one to ``Pipeline.run`` and look at its ``spans`` afterwards.

    On the CPU an action's time is the host's, from its call to its return; stages there run in
    turn. On CUDA it is the device's, between two events on the stream that the action is issued to,
    without what it waits for of its own stage. Marking costs the host some microseconds per action.
    Loads, forwards, losses, backwards, updates and sends are recorded; pulling a batch and
    receiving are not.

    A trace holds the last run that it was given to, in memory that grows with the run's length.
    """

    ranges = True

    def __init__(self) -> None:
        self._records: list[tuple[int, Action, Mark, Mark]] = []
        self._rules: Sequence[Rules] = ()
        self._wall = 0.0  # what a clock on the wall is ahead of the marks
        self._origins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        """Forget what was recorded; a run begins.

        Args:
            rules: which weights every stage computes with.
            devices: of every stage; CUDA devices are synchronized once, to compare their clocks.
        """
        self._records.clear()
        self._rules = rules
        self._wall = time.time() - time.perf_counter()
        self._origins.clear()
        for device in devices:
            if device.type == "cuda" and device not in self._origins:
                torch.cuda.synchronize(device)
                event = torch.cuda.Event(enable_timing=True)
                event.record(torch.cuda.current_stream(device))
                self._origins[device] = time.perf_counter(), event

    def watch(self, stage: Stage, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        """The handlers of a stage's actions, with a mark before and after each."""
        return {
            kind: self._watched(stage, kind, handler) if kind in _LANES else handler
            for kind, handler in handlers.items()
        }

    def _watched(self, stage: Stage, kind: Kind, handler: Handler) -> Handler:
        stream = stream_of(stage, kind)
        records, k = self._records, stage.index

        def watched(i: int, j: int) -> None:
            start = mark(stream)
            handler(i, j)
            records.append((k, Action(kind, i, j), start, mark(stream)))

        return watched

    def spans(self) -> list[Span]:
        """What was recorded, each stage's in order, in seconds from the first action's start.

        Waits for CUDA devices. After a run that failed: what ended before.
        """
        ledgers = open_ledgers(len(self._rules), self._rules)
        readings: list[tuple[int | None, int]] = []
        for k, action, _, _ in self._records:
            if action.kind in _TURNS:
                readings += ledgers[k].enter([action])
            else:
                readings.append((None, 0))
        found: list[Span] = []
        lane_ends: dict[tuple[int, Lane], float] = {}
        first = min((self._seconds(record[2]) for record in self._records), default=0.0)
        for (k, action, start, end), reading in zip(self._records, readings, strict=True):
            lane = _LANES[action.kind]
            # An event on an idle stream happens at once, although what comes after it has to wait
            # for the stage's computation.
            free = max(lane_ends.get((k, lane), 0.0), lane_ends.get((k, "compute"), 0.0))
            begun = max(self._seconds(start) - first, free)
            ended = max(self._seconds(end) - first, begun)
            lane_ends[k, lane] = ended
            found.append(Span(k, lane, *action, begun, ended, *reading))
        return found

    @property
    def origin(self) -> float:
        """When the first action started, in seconds since 1970, for ``write_trace``."""
        return self._wall + min((self._seconds(record[2]) for record in self._records), default=0.0)

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        at, origin = self._origins[mark.device]
        mark.synchronize()
        return at + float(origin.elapsed_time(mark)) / 1000.0


def stream_of(stage: Stage, kind: Kind) -> Stream:
    """The stream that an action is issued to."""
    edge = {Kind.SEND_ACTIVATION: stage.to_next, Kind.SEND_GRADIENT: stage.to_previous}.get(kind)
    if edge is not None:
        return edge.stream
    loads = kind in (Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD, Kind.UPDATE)
    return stage.predict if loads else stage.compute


def mark(stream: Stream) -> Mark:
    """Now, on the CPU; on CUDA, the moment when the stream has done what it was given so far."""
    if not isinstance(stream, CudaStream):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    stream.record(event)
    return event


def seconds_between(marks: Sequence[tuple[Mark, Mark]]) -> float:
    """The sum of the times between pairs of marks in order; waits until the last has been passed.

    An event on an idle stream happens at once: of what overlaps there, the later part counts.
    """
    total = 0.0
    before: torch.cuda.Event | None = None
    for start, end in marks:
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            total += end - start
            continue
        end.synchronize()
        taken = float(start.elapsed_time(end))
        if before is not None:
            taken = min(taken, float(before.elapsed_time(end)))
        total += max(0.0, taken) / 1000.0
        before = end
    return total
