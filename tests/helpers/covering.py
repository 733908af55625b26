"""Few rows of settings in which every pair of values appears."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


def covering(
    axes: Mapping[str, Sequence[Any]], makes_sense: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Return rows with one value of every axis, which contain each possible pair of values.

    A pair is possible if some row with it makes sense. Greedy, from a fixed seed: all processes
    that share the tests must choose the same.
    """
    names, draw, rows = list(axes), random.Random(0), list[Row]()
    every = [
        dict(zip(names, at, strict=True))
        for at in itertools.product(*(range(len(axes[name])) for name in names))
    ]
    every = [at for at in every if makes_sense(_values(axes, at))]
    wanted = dict.fromkeys(pair for at in every for pair in _pairs(at))
    while wanted:
        tried = draw.sample(every, min(60, len(every)))
        best = max(tried, key=lambda at: sum(pair in wanted for pair in _pairs(at)))
        if not any(pair in wanted for pair in _pairs(best)):
            first = next(iter(wanted))
            best = next(at for at in every if first in _pairs(at))
        rows.append(_values(axes, best))
        for pair in _pairs(best):
            wanted.pop(pair, None)
    return rows


def _values(axes: Mapping[str, Sequence[Any]], at: Mapping[str, int]) -> Row:
    return {name: axes[name][index] for name, index in at.items()}


def _pairs(at: Mapping[str, int]) -> list[Pair]:
    return list(itertools.combinations(at.items(), 2))


def walks(
    events: Sequence[str], allowed: Sequence[Callable[[str], bool]], length: int
) -> list[list[str]]:
    """Return a sequence of events for each rule of what is allowed in it.

    Together they contain every pair of events in a row, as far as rules and length permit.
    """
    draw, seen, found = random.Random(0), set[tuple[str, str]](), list[list[str]]()

    def left(event: str, mine: Sequence[str]) -> int:
        return sum((event, other) not in seen for other in mine)

    for rule in allowed:
        mine = [event for event in events if rule(event)]
        walk = [max(mine, key=lambda event, mine=mine: left(event, mine))]
        while len(walk) < length:
            new = [event for event in mine if (walk[-1], event) not in seen]
            most = max(left(event, mine) for event in new or mine)
            walk.append(draw.choice([e for e in new or mine if left(e, mine) == most]))
            seen.add((walk[-2], walk[-1]))
        found.append(walk)
    return found


def neighbours(sequences: Iterable[Sequence[str]]) -> set[tuple[str, str]]:
    return {pair for sequence in sequences for pair in itertools.pairwise(sequence)}
