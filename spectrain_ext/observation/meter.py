"""Counts and times the work of a stage, and measures the errors of its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from spectrain_ext.operators import distance
from spectrain_ext.pipeline.passes import Handler
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.stage_run import StageRun
from spectrain_ext.schedule import Kind, Rules
from spectrain_ext.transport import Sender

from .trace import WORK, Mark, Record, marked, seconds_between


class Errors(NamedTuple):
    """Norms of differences from the true weights, divided by the norm of these."""

    prediction: float | None  # of the weights a forward computed with; None: no prediction
    staleness: float  # of the newest weights at that forward


class Probe:
    """Compares the weights of one forward in ``every`` with the true ones, one horizon later.

    This keeps two copies of the stage's weights until then, passes over them each time, and waits
    for the stage's prediction stream.
    """

    def __init__(self, stage: Stage, rules: Rules, delay: int, every: int) -> None:
        assert stage.weights is not None
        self._stage, self._weights = stage, stage.weights
        horizon = rules.forward_horizon
        self._predicts = horizon != 0
        # Without prediction: compare with the weights at the minibatch's own backward.
        self._ahead = delay if horizon == "counted" or not horizon else horizon
        self._every = every
        # The update that is compared with, and the weights: the newest, and those computed with.
        self._kept: tuple[int, list[list[Tensor]]] | None = None

    def forward(self, i: int, j: int, updates: int) -> None:
        """Copy the weights of a forward, issued after so many updates, if it is to be measured."""
        if j or i % self._every or self._kept is not None or not self._ahead:
            return
        with self._stage.reading():
            newest = self._weights.newest()
            copies = [[true.clone() for true in newest]]
            if self._predicts:
                pairs = zip(self._weights.params, newest, strict=True)
                copies.append([torch.empty_like(true).copy_(p) for p, true in pairs])
        self._kept = updates + self._ahead, copies

    def update(self, updates: int) -> Errors | None:
        """Return the errors if this update, the latest of so many, is the one predicted."""
        if self._kept is None or self._kept[0] != updates:
            return None
        (_, copies), self._kept = self._kept, None
        with self._stage.reading():
            now = self._weights.newest()
            _, norms = distance(now, copies)
            staleness, *prediction = (norms / get_total_norm(now).double()).tolist()
        return Errors(prediction[0] if prediction else None, staleness)


@dataclass
class Window:
    began: float  # seconds since the epoch
    ended: float = 0.0
    minibatches: int = 0  # updated from
    samples: int = 0  # in forwards
    done: int = 0  # minibatches so far, over all runs
    work: list[Record] = field(default_factory=list)
    delays: list[int] = field(default_factory=list)  # of backwards: updates since the forward
    errors: Errors | None = None  # the latest
    losses: list[Tensor] = field(default_factory=list)  # of minibatches, on the last stage
    sent: list[int] = field(default_factory=list)  # bytes to the next and to the previous stage

    def busy(self) -> dict[str, float]:
        """Return the seconds of each kind of work; on CUDA, wait until it is done."""
        marks: dict[str, list[tuple[Mark, Mark]]] = {}
        for _, kind, _, _, start, end in self.work:
            marks.setdefault(WORK[kind], []).append((start, end))
        return {name: seconds_between(pairs) for name, pairs in marks.items()}


class Meter:
    """Measures a stage in windows of ``every`` minibatches, after ``start`` others."""

    def __init__(
        self, stage: Stage, every: int, start: int, ended: Callable[[Meter], None]
    ) -> None:
        self.stage = stage
        self.full: list[Window] = []  # ended, not yet written
        self._every = every
        self._done = start
        self._ended = ended
        self._records: list[Record] = []
        self.is_last = False  # whether it has the losses
        self._sent = [0, 0]  # bytes at the end of the window before
        self._senders: Sequence[Iterable[Sender]] = ((), ())  # to the next and previous stage
        self.begin()

    def begin(self) -> None:
        self._updates = 0
        self._read_at: dict[tuple[int, int], int] = {}  # updates at a microbatch's forward
        self._records.clear()
        self._open(time.time())

    def end(self) -> None:
        if self.window.minibatches:
            self._close()

    def handlers(
        self, run: StageRun, given: dict[Kind, Handler], probe: Probe | None
    ) -> dict[Kind, Handler]:
        timed = marked(run, given, self._records)
        self.is_last = bool(run.edges.targets)
        if not any(self._senders):
            self._senders = set(run.edges.to_next), set(run.edges.to_previous)
            self._sent = self._sent_bytes()

        def forward(i: int, j: int) -> None:
            self.window.samples += run.samples
            self._read_at[i, j] = self._updates
            timed[Kind.FORWARD](i, j)
            if probe is not None:
                probe.forward(i, j, self._updates)

        def backward(kind: Kind, i: int, j: int) -> None:  # or its first half
            self.window.delays.append(self._updates - self._read_at.pop((i, j)))
            timed[kind](i, j)

        def update(i: int, j: int) -> None:
            timed[Kind.UPDATE](i, j)
            self._updates += 1
            self._done += 1
            self.window.minibatches += 1
            if probe is not None:
                self.window.errors = probe.update(self._updates) or self.window.errors
            if self.window.minibatches == self._every:
                self._close()
                self._ended(self)

        noted = {kind: partial(backward, kind) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
        return {**timed, **noted, Kind.FORWARD: forward, Kind.UPDATE: update}

    def _close(self) -> None:
        window = self.window
        window.ended, window.done, window.work = time.time(), self._done, self._records[:]
        self._records.clear()
        window.sent = [b - a for a, b in zip(self._sent, self._sent_bytes(), strict=True)]
        self.full.append(window)
        self._open(window.ended)

    def _open(self, began: float) -> None:
        self.window, self._sent = Window(began), self._sent_bytes()

    def _sent_bytes(self) -> list[int]:
        return [sum(sender.sent_bytes for sender in senders) for senders in self._senders]
