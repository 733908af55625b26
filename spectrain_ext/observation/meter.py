"""Meter: counts and times what one stage does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from spectrain_ext.pipeline.loads import Handler
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.schedule import Kind

from .marks import WORK, Mark, Record, marked, seconds_between
from .probe import Errors, Probe


@dataclass
class Window:
    """What was counted over some minibatches.

    Attributes:
        began, ended: by the host's clock, in seconds since the epoch.
        minibatches, samples: that were updated from, and that went forward.
        done: minibatches of this stage so far, over all runs.
        work: begin and end of every piece of work, in order.
        delays: number of backwards by the updates since their forward.
        errors: the last ones found.
        losses: of minibatches, on the last stage.
    """

    began: float
    ended: float = 0.0
    minibatches: int = 0
    samples: int = 0
    done: int = 0
    work: list[Record] = field(default_factory=list)
    delays: Counter[int] = field(default_factory=Counter)
    errors: Errors | None = None
    losses: list[Tensor] = field(default_factory=list)

    def busy(self) -> dict[str, float]:
        """Seconds of each kind of work; on CUDA, waits until it has been done."""
        marks: dict[str, list[tuple[Mark, Mark]]] = {}
        for _, kind, _, _, start, end in self.work:
            marks.setdefault(WORK[kind][1], []).append((start, end))
        return {name: seconds_between(pairs) for name, pairs in marks.items()}

    def mean_delay(self) -> float | None:
        """Updates between a forward and its backward, on average."""
        count = self.delays.total()
        return sum(self.delays.elements()) / count if count else None

    def mean_loss(self) -> float | None:
        """Of minibatches; on CUDA, waits until the last has been computed."""
        return sum(loss.item() for loss in self.losses) / len(self.losses) if self.losses else None


class Meter:
    """Of one stage.

    Args:
        stage: the stage.
        probe: looks at its weights, None: nobody does.
        every: minibatches of a window.
        start: minibatches that were done before.
        ended: is told whenever a window has.

    Attributes:
        full: windows that have ended and not been taken.
        probe: as given; another takes effect with the next ``handlers``.
    """

    def __init__(
        self,
        stage: Stage,
        probe: Probe | None,
        every: int,
        start: int,
        ended: Callable[[Meter], None],
    ) -> None:
        self.stage = stage
        self.full: list[Window] = []
        self.probe = probe
        self._every = every
        self._done = start
        self._ended = ended
        self._records: list[Record] = []
        self.begin()

    def begin(self) -> None:
        self._updates = 0
        self._read_at: dict[tuple[int, int], int] = {}  # updates at a microbatch's forward
        self._records.clear()
        self._window = Window(time.time())
        if self.probe is not None:
            self.probe.begin()

    def end(self) -> None:
        if self._window.minibatches:
            self._close()

    def loss(self, loss: Tensor) -> None:
        self._window.losses.append(loss)

    def handlers(self, given: dict[Kind, Handler]) -> dict[Kind, Handler]:
        """Those given, and before and after each what is to be noted."""
        probe = self.probe
        timed = marked(self.stage, given, self._records)

        def forward(i: int, j: int) -> None:
            self._window.samples += self.stage.samples
            self._read_at[i, j] = self._updates
            timed[Kind.FORWARD](i, j)
            if probe is not None:
                probe.forward(i, j, self._updates)

        def first(kind: Kind) -> Handler:  # a backward, or its first half
            def backward(i: int, j: int) -> None:
                self._window.delays[self._updates - self._read_at.pop((i, j))] += 1
                timed[kind](i, j)

            return backward

        def update(i: int, j: int) -> None:
            timed[Kind.UPDATE](i, j)
            self._updates += 1
            self._done += 1
            self._window.minibatches += 1
            if probe is not None:
                self._window.errors = probe.update(self._updates) or self._window.errors
            if self._window.minibatches == self._every:
                self._close()
                self._ended(self)

        noted = {kind: first(kind) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
        return {**timed, **noted, Kind.FORWARD: forward, Kind.UPDATE: update}

    def _close(self) -> None:
        window = self._window
        window.ended, window.done, window.work = time.time(), self._done, self._records[:]
        self._records.clear()
        self.full.append(window)
        self._window = Window(window.ended)
