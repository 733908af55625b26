"""Meter: counts and times what one stage does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spectrain_ext.pipeline.observer import Handler
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.schedule import Kind

from .probe import Errors, Probe
from .trace import Mark, mark, seconds_between, stream_of

#: What counts as work, under the name that it has in a record.
WORK: dict[Kind, str] = {
    Kind.LOAD_FORWARD: "predict",
    Kind.LOAD_BACKWARD: "predict",
    Kind.FORWARD: "forward",
    Kind.LOSS: "loss",
    Kind.BACKWARD: "backward",
    Kind.UPDATE: "update",
    Kind.SEND_ACTIVATION: "send",
    Kind.SEND_GRADIENT: "send",
}


@dataclass
class Window:
    """What was counted over some minibatches.

    Attributes:
        began, ended: by the host's clock, in seconds since the epoch.
        minibatches, samples: that were updated from, and that went forward.
        done: minibatches of this stage so far, over all runs.
        marks: begin and end of every piece of work, in order, by its name.
        delays: number of backwards by the updates since their forward.
        errors: the last ones found.
        losses: of minibatches, on the last stage.
    """

    began: float
    ended: float = 0.0
    minibatches: int = 0
    samples: int = 0
    done: int = 0
    marks: dict[str, list[tuple[Mark, Mark]]] = field(default_factory=dict)
    delays: dict[int, int] = field(default_factory=dict)
    errors: Errors | None = None
    losses: list[Tensor] = field(default_factory=list)

    def busy(self) -> dict[str, float]:
        """Seconds of each kind of work; on CUDA, waits until it has been done."""
        return {name: seconds_between(marks) for name, marks in self.marks.items()}


class Meter:
    """Of one stage.

    Args:
        stage: the stage.
        probe: looks at its weights, None: nobody does.
        every: minibatches of a window.
        start: minibatches that were done before.

    Attributes:
        full: windows that have ended and not been taken.
    """

    def __init__(self, stage: Stage, probe: Probe | None, every: int, start: int) -> None:
        self.stage = stage
        self.probe = probe
        self.full: list[Window] = []
        self._every = every
        self._done = start
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self._updates = 0
        self._read_at: dict[tuple[int, int], int] = {}  # updates at a microbatch's forward
        self._window = Window(time.time())
        if self.probe is not None:
            self.probe.begin()

    def end(self) -> None:
        """The run has ended: so has the window."""
        if self._window.minibatches:
            self._close()

    def loss(self, loss: Tensor) -> None:
        """Of a minibatch."""
        self._window.losses.append(loss)

    def handlers(self, given: dict[Kind, Handler]) -> dict[Kind, Handler]:
        """Those given, and before and after each what is to be noted."""
        found = {
            kind: self._timed(kind, WORK[kind], handler) if kind in WORK else handler
            for kind, handler in given.items()
        }
        noted = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.UPDATE: self._update,
        }
        return {**found, **{kind: note(found[kind]) for kind, note in noted.items()}}

    def _timed(self, kind: Kind, name: str, handler: Handler) -> Handler:
        stream = stream_of(self.stage, kind)

        def timed(i: int, j: int) -> None:
            start = mark(stream)
            handler(i, j)
            self._window.marks.setdefault(name, []).append((start, mark(stream)))

        return timed

    def _forward(self, handler: Handler) -> Handler:
        def forward(i: int, j: int) -> None:
            self._window.samples += self.stage.samples
            self._read_at[i, j] = self._updates
            handler(i, j)
            if self.probe is not None:
                self.probe.forward(i, j, self._updates)

        return forward

    def _backward(self, handler: Handler) -> Handler:
        def backward(i: int, j: int) -> None:
            delays = self._window.delays
            between = self._updates - self._read_at.pop((i, j))
            delays[between] = delays.get(between, 0) + 1
            handler(i, j)

        return backward

    def _update(self, handler: Handler) -> Handler:
        def update(i: int, j: int) -> None:
            handler(i, j)
            self._updates += 1
            self._done += 1
            self._window.minibatches += 1
            if self.probe is not None:
                self._window.errors = self.probe.update(self._updates) or self._window.errors
            if self._window.minibatches == self._every:
                self._close()

        return update

    def _close(self) -> None:
        window = self._window
        window.ended, window.done = time.time(), self._done
        self.full.append(window)
        self._window = Window(window.ended)


def mean_delay(delays: dict[int, int]) -> float | None:
    """Updates between a forward and its backward, on average."""
    count = sum(delays.values())
    return sum(updates * number for updates, number in delays.items()) / count if count else None


def mean_loss(losses: Sequence[Tensor]) -> float | None:
    """Of minibatches; on CUDA, waits until the last has been computed."""
    return sum(loss.item() for loss in losses) / len(losses) if losses else None
