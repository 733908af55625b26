"""Trains on batches in several runs, with something to do in between: a save, another method."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from spectrain_ext.method import Phase
from spectrain_ext.schedule import Kind

from .observer import Observer

if TYPE_CHECKING:
    from .losses import Result
    from .passes import Handler
    from .stage_run import StageRun


class Segment:
    """The batches of one run. It takes no more of them than the run asks for."""

    cut = False  # whether it ended because ``ends`` said so
    exhausted = False  # whether no batch was left

    def __init__(self, batches: Iterator[object], ends: Callable[[int], bool]) -> None:
        self._batches, self._ends = batches, ends

    def __iter__(self) -> Iterator[object]:
        for taken in count():
            self.cut = self._ends(taken)
            if self.cut:
                return
            try:
                batch = next(self._batches)
            except StopIteration:
                self.exhausted = True
                return
            yield batch


def segments(
    batches: Iterator[object],  # of all runs
    ends: Callable[[int], bool],  # whether a run that has taken so many batches takes no other
    run: Callable[[Iterable[object]], Iterator[Result]],  # trains, by ``Pipeline.run``
    # Called after each run, and whether the caller has left the loop: returns the number of the
    # next run's first result. None: there is no other run.
    follow: Callable[[Segment, bool], int | None],
    number: int = 0,  # of the first result
) -> Iterator[Result]:
    """Train in one run after another, and drain in between; yield the results of all of them."""
    left, following = False, cast("int | None", number)
    while following is not None:
        segment = Segment(batches, ends)
        results = run(segment)
        try:
            for result in results:
                if not left:  # where another process feeds the runs, they go on to their end
                    yield replace(result, index=following + result.index)
        except GeneratorExit:
            cast("Generator[Result, None, None]", results).close()  # drains
            left = True
        following = follow(segment, left)


class Until(Observer):
    """Tells during a run when the next phase of a method begins.

    If that begins at a gap of stage 0, this also measures it: how far the weights move from a
    minibatch's forward to its own update, relative to the norm of the weights before that update.
    """

    def __init__(self, phase: Phase | None) -> None:
        self._phase = phase
        self._largest = 0.0  # the largest gap so far; 0 where stage 0 is in another process
        # The minibatch that is measured, with a copy of the weights of its forward: one at a time,
        # to save memory.
        self._read: tuple[int, list[Tensor]] | None = None

    def begins(self, minibatches: int) -> bool:
        """Whether the phase begins after so many minibatches of all runs."""
        if self._phase is None:
            return False
        after, most = self._phase.after, self._phase.gap
        return (after is not None and minibatches >= after) or (
            most is not None and self._largest > most
        )

    def watch(self, run: StageRun, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        stage, weights = run.stage, run.stage.weights
        if self._phase is None or self._phase.gap is None or stage.index or weights is None:
            return handlers
        from spectrain_ext.operators import distance  # loaded only where a gap is measured

        given = handlers[Kind.FORWARD], handlers[Kind.UPDATE]

        def forward(i: int, j: int) -> None:
            if self._read is None and i > 0 and j == 0:  # the first of a run is never late
                with stage.reading():
                    pairs = zip(weights.params, weights.newest(), strict=True)
                    self._read = i, [torch.empty_like(now).copy_(p) for p, now in pairs]
            given[0](i, j)

        def update(i: int, j: int) -> None:
            if self._read is not None and self._read[0] == i:
                with stage.reading():
                    true = weights.newest()
                    _, (norm,) = distance(true, [self._read[1]])
                    self._read = None
                    gap = float(norm / get_total_norm(true).double())
                    self._largest = max(self._largest, gap)
            given[1](i, j)

        return {**handlers, Kind.FORWARD: forward, Kind.UPDATE: update}
