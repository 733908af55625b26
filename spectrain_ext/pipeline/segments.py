"""Trains on batches in several runs, with something to do in between: a save, another method."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from .losses import Result


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
