"""Records when each step of a run ran, on the CPU or on its device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from spectrain_ext.pipeline import SHOWN_STEPS, Handler, Observer
from spectrain_ext.schedule import COMPUTE, Entries, Instruction, Kind, Ledger, Rules
from spectrain_ext.tools.simulation import Lane, Span
from spectrain_ext.transport import CudaStream, Stream

if TYPE_CHECKING:
    from spectrain_ext.pipeline import StageRun

Mark = float | torch.cuda.Event
#: Stage, kind, minibatch, microbatch, start and end of a step.
Action = tuple[int, Kind, int, int, Mark, Mark]

WORK = {kind: work for kind, (_, work) in SHOWN_STEPS.items() if work is not None}
_LANES: dict[Kind, Lane] = {Kind.SEND_ACTIVATION: "to next", Kind.SEND_GRADIENT: "to previous"}


@dataclass
class _Part:
    """A part of a run under one method."""

    records: list[Action] = field(default_factory=list)  # which count minibatches from its start
    # Of each stage here: its rules, and what makes the instructions of stage 0; None: no weights.
    stages: dict[int, tuple[Rules, Callable[[], Iterator[Instruction]]] | None] = field(
        default_factory=dict
    )


class Trace(Observer):
    """Records the times of a run's steps: pass it to ``Pipeline.run``, then read its ``spans``.

    On the CPU a step's time is from its call to its return, and stages run in turn. On CUDA it
    is the time between two events on the step's stream, without waits for its own stage. Marking
    costs some microseconds of CPU time per step. Loads, forwards, losses, backwards, updates and
    sends are recorded; pulling a batch and receiving are not.

    A trace holds the latest run, in memory that grows with the run's length.

    Example:
        >>> pipe = st.Pipeline([nn.Linear(4, 4), nn.Linear(4, 2)],
        ...     lambda p: st.optim.SGD(p, lr=0.1, momentum=0.9), nn.functional.mse_loss)
        >>> trace = st.Trace()
        >>> for result in pipe.run([(torch.ones(2, 4), torch.zeros(2, 2))], trace=trace):
        ...     pass
        >>> [span.kind.value for span in trace.spans() if (span.stage, span.microbatch) == (0, 0)]
        ['load forward weights', 'forward', 'send activation', 'load backward weights', 'backward',
        'update']
    """

    ranges = True

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._wall = 0.0  # time of day less the clock of the marks
        self._origins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        """Forget the previous run; synchronize CUDA devices once, to compare their clocks."""
        self._parts = [_Part()]
        self._wall = time.time() - time.perf_counter()
        self._origins.clear()
        for device in devices:
            if device.type == "cuda" and device not in self._origins:
                torch.cuda.synchronize(device)
                event = torch.cuda.Event(enable_timing=True)
                event.record(torch.cuda.current_stream(device))
                self._origins[device] = time.perf_counter(), event

    def watch(self, run: StageRun, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        k, weights = run.stage.index, run.stage.weights
        if k in self._parts[-1].stages:  # the method has changed
            self._parts.append(_Part())
        part = self._parts[-1]
        part.stages[k] = None if weights is None else (weights.rules, weights.entry)
        return marked(run, handlers, part.records)

    def spans(self) -> list[Span]:
        """Return the recorded steps, in order per stage, in seconds from the first one's start.

        Waits for CUDA devices. After a failed run, these are the steps that ended.
        """
        spans: list[Span] = []
        lane_ends: dict[tuple[int, Lane], float] = {}
        first, before = self._first(), 0  # minibatches
        for part in self._parts:
            ledgers = {
                k: Ledger(k, at[0], entries=Entries(at[1]())) if at else Ledger(k)
                for k, at in part.stages.items()
            }
            for k, kind, i, j, start, end in part.records:
                lane = _LANES.get(kind, "compute")
                version, horizon = None, 0
                if kind in COMPUTE:
                    version, horizon = ledgers[k].enter(Instruction(kind, i, j))
                    version += before
                # An event on an idle stream is recorded at once, although the step after it waits
                # for the stage's computation.
                free = max(lane_ends.get((k, lane), 0.0), lane_ends.get((k, "compute"), 0.0))
                begun = max(self._seconds(start) - first, free)
                ended = max(self._seconds(end) - first, begun)
                lane_ends[k, lane] = ended
                spans.append(Span(k, lane, kind, before + i, j, begun, ended, version, horizon))
            # A rank learns of the end of a run after some steps of a minibatch without an update.
            done = (i for _, kind, i, *_ in part.records if kind is Kind.UPDATE)
            before += 1 + max(done, default=-1)
        return spans

    @property
    def origin(self) -> float:
        """The start of the first step in seconds since 1970, for ``write_trace``."""
        return self._wall + self._first()

    def _first(self) -> float:
        starts = (start for part in self._parts for *_, start, _ in part.records)
        return min(map(self._seconds, starts), default=0.0)

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        at, origin = self._origins[mark.device]
        mark.synchronize()
        return at + float(origin.elapsed_time(mark)) / 1000.0


def marked(
    run: StageRun, handlers: dict[Kind, Handler], records: list[Action]
) -> dict[Kind, Handler]:
    return {
        kind: _marked(run, kind, handler, records) if kind in WORK else handler
        for kind, handler in handlers.items()
    }


def _marked(of: StageRun, kind: Kind, handler: Handler, records: list[Action]) -> Handler:
    stage, edges = of.stage, of.edges
    sends = {Kind.SEND_ACTIVATION: edges.to_next, Kind.SEND_GRADIENT: edges.to_previous}.get(kind)
    stream = stage.predict if WORK[kind] == "predict" else stage.compute
    stream, k = sends[0].stream if sends else stream, stage.index

    def run(i: int, j: int) -> None:
        start = _mark(stream)
        handler(i, j)
        records.append((k, kind, i, j, start, _mark(stream)))

    def update(i: int, j: int) -> None:
        starts = {each: _mark(each) for each in (stage.compute, stage.predict)}
        handler(i, j)
        on = stage.updated_on  # which is known only then
        records.append((k, kind, i, j, starts[on], _mark(on)))

    return update if kind is Kind.UPDATE else run


def _mark(stream: Stream) -> Mark:
    """Return the time on the CPU; on CUDA, an event after the work issued to the stream so far."""
    if not isinstance(stream, CudaStream):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    stream.record(event)
    return event


def seconds_between(marks: Sequence[tuple[Mark, Mark]]) -> float:
    """Return the summed times between ordered pairs of marks; wait until the last is passed."""
    total = 0.0
    before: torch.cuda.Event | None = None
    for start, end in marks:
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            total += end - start
            continue
        end.synchronize()
        taken = float(start.elapsed_time(end))
        # An event on an idle stream is recorded at once: count only the later part of an overlap.
        if before is not None:
            taken = min(taken, float(before.elapsed_time(end)))
        total += max(0.0, taken) / 1000.0
        before = end
    return total
