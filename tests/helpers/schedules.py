"""Schedules of a limited number of minibatches, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import strategies as some

from spectrain_ext.schedule import GENERATORS, Instruction, Kind, bounded
from spectrain_ext.tools.simulation import streams

Name = str | Callable


def classic(n):
    return [n - k for k in range(n)]


def wide(n):
    return [2 * (n - k) - 1 for k in range(n)]


def finite(name: Name, windows: Sequence[int], minibatches: int, microbatches: int = 1):
    """Return every stage's actions, as lists."""
    made = streams(name, windows, microbatches)
    return [list(bounded(stage, k, minibatches)) for k, stage in enumerate(made)]


def update(i: int) -> Instruction:
    return Instruction(Kind.UPDATE, i)


class Run(NamedTuple):
    name: Name
    windows: list[int]
    microbatches: int
    minibatches: int

    @property
    def stages(self) -> int:
        return len(self.windows)

    def streams(self):
        return streams(self.name, self.windows, self.microbatches)

    def finite(self):
        return finite(self.name, self.windows, self.minibatches, self.microbatches)


def runs(
    stages: int = 6,
    least: int = 1,
    most: int = 8,
    names: Sequence[Name] = (*sorted(GENERATORS),),
) -> some.SearchStrategy[Run]:
    """Draw a schedule with non-increasing windows, or with its own if it has some."""

    @some.composite
    def run(draw):
        name, n = draw(some.sampled_from(names)), draw(some.integers(1, stages))
        m = draw(some.integers(1, 4))
        windows = sorted(draw(some.lists(some.integers(1, 12), min_size=n, max_size=n)))[::-1]
        if hasattr(name, "window"):
            windows = [name.window(k, n, m) for k in range(n)]
        return Run(name, windows, m, draw(some.integers(least, most)))

    return run()
