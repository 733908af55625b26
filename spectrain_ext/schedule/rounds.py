"""Rounds: how far ahead the end of a minibatch is, counted in updates from a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .actions import Action, Kind
from .simulation import Durations, simulate


class Horizons(NamedTuple):
    """Updates that a stage makes for other minibatches before a minibatch is done on all stages.

    Attributes:
        forward: counted from the version that the minibatch's first forward read.
        backward: counted from the version current at its backward.
    """

    forward: int
    backward: int


def count_horizons(
    actions: Sequence[Iterable[Action]],
    durations: Durations,
    *,
    minibatch: int,
    minibatches: int | None = None,
) -> list[Horizons]:
    """How many updates ahead the end of a minibatch is, for every stage.

    A minibatch ends with its update on stage 0. What a stage has updated by then, less its own
    update for the minibatch, less the version that it read: that is the horizon that SpecTrain
    (arXiv 1809.02839) predicts over. With the classic window, one microbatch per minibatch and
    forwards as long as backwards, so that everything goes in rounds of one forward and one backward
    each, it is ``k//2 + N-k-1`` and ``k//2``, the closed form there.

    Args:
        actions: of every stage; finite, or endless with ``minibatches``.
        durations: of every stage.
        minibatch: one in the middle of the run, where it has settled.
        minibatches: the length of the run.

    Raises:
        ScheduleError: the schedule cannot be run.
        ValueError: there is no such minibatch.
    """
    n = len(actions)
    read: list[int | None] = [None] * n
    updates: list[list[float]] = [[] for _ in range(n)]
    for span in simulate(actions, durations, minibatches=minibatches):
        if span.kind is Kind.UPDATE:
            updates[span.stage].append(span.end)
        elif span.kind is Kind.FORWARD and span.minibatch == minibatch and not span.microbatch:
            read[span.stage] = span.version
    if not 0 <= minibatch < min(map(len, updates)):
        raise ValueError(f"minibatch: expected 0 to {len(updates[0]) - 1}, got {minibatch}")
    end = updates[0][minibatch]
    found = []
    for k in range(n):
        others = sum(time <= end for time in updates[k]) - 1
        version = read[k]
        assert version is not None
        found.append(Horizons(others - version, others - minibatch))
    return found
