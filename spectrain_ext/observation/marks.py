"""Marks: when the actions of a stage begin and end, on the host or on its device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from spectrain_ext.pipeline.loads import Handler
from spectrain_ext.schedule import Kind, Lane
from spectrain_ext.transport import CudaStream, Stream

if TYPE_CHECKING:
    from spectrain_ext.pipeline.stage import Stage

Mark = float | torch.cuda.Event
#: Stage, kind, minibatch and microbatch of an action, its begin and its end.
Record = tuple[int, Kind, int, int, Mark, Mark]

#: What counts as work: the lane that is busy with it, and its name in a record of metrics.
WORK: dict[Kind, tuple[Lane, str]] = {
    Kind.LOAD_FORWARD: ("compute", "predict"),
    Kind.LOAD_BACKWARD: ("compute", "predict"),
    Kind.FORWARD: ("compute", "forward"),
    Kind.LOSS: ("compute", "loss"),
    Kind.BACKWARD: ("compute", "backward"),
    Kind.LOAD_BACKWARD_INPUT: ("compute", "predict"),
    Kind.BACKWARD_INPUT: ("compute", "backward"),
    Kind.BACKWARD_WEIGHTS: ("compute", "backward"),
    Kind.UPDATE: ("compute", "update"),
    Kind.SEND_ACTIVATION: ("to next", "send"),
    Kind.SEND_GRADIENT: ("to previous", "send"),
}


def marked(
    stage: Stage, handlers: dict[Kind, Handler], records: list[Record]
) -> dict[Kind, Handler]:
    """The handlers of a stage's actions; those that are work add to ``records``."""
    return {
        kind: _marked(stage, kind, handler, records) if kind in WORK else handler
        for kind, handler in handlers.items()
    }


def _marked(stage: Stage, kind: Kind, handler: Handler, records: list[Record]) -> Handler:
    edges = stage.edges
    sends = {Kind.SEND_ACTIVATION: edges.to_next, Kind.SEND_GRADIENT: edges.to_previous}.get(kind)
    loads = WORK[kind][1] in ("predict", "update")
    own = stage.predict if loads else stage.compute
    stream = sends[0].stream if sends else own
    k = stage.index

    def run(i: int, j: int) -> None:
        start = _mark(stream)
        handler(i, j)
        records.append((k, kind, i, j, start, _mark(stream)))

    return run


def _mark(stream: Stream) -> Mark:
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
