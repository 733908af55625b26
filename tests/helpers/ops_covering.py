"""Makes covering arrays: few rows of options in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Options: TypeAlias = dict[str, Any]
Factors: TypeAlias = Mapping[str, Sequence[Any]]
Pair: TypeAlias = frozenset[tuple[str, Any]]  # of two names with their values
#: Combinations that no row has: for each factor named, some of its values.
Excluded: TypeAlias = Sequence[Mapping[str, Sequence[Any]]]

_TRIES = 200  # to complete a row; choices made early can exclude every value of a later factor


def allowed(options: Options, excluded: Excluded) -> bool:
    """Return whether options, perhaps incomplete, have none of the excluded combinations."""
    return not any(
        all(name in options and options[name] in values for name, values in combination.items())
        for combination in excluded
    )


def pairs_of(options: Options) -> Iterable[Pair]:
    """Return every pair of values that these options have."""
    return map(frozenset, itertools.combinations(options.items(), 2))


def required_pairs(factors: Factors, excluded: Excluded) -> list[Pair]:
    """Return the pairs of values that are not excluded."""
    return [
        frozenset(((one, a), (other, b)))
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
        if allowed({one: a, other: b}, excluded)
    ]


def covering_array(factors: Factors, excluded: Excluded) -> list[Options]:
    """Return rows with all required pairs, always the same ones: greedy, like AETG."""
    dice = random.Random(0)
    missing = dict.fromkeys(required_pairs(factors, excluded))
    rows: list[Options] = []
    while missing:
        rows.append(_row(next(iter(missing)), factors, excluded, missing, dice))
        for pair in pairs_of(rows[-1]):
            missing.pop(pair, None)
    return rows


def _row(
    start: Pair,
    factors: Factors,
    excluded: Excluded,
    missing: Mapping[Pair, None],
    dice: random.Random,
) -> Options:
    """Complete a row: each factor gets the value that adds most pairs to those present."""
    for _ in range(_TRIES):
        row = dict(start)
        for name in dice.sample(list(factors), len(factors)):
            if name in row:
                continue
            fitting = [v for v in factors[name] if allowed({**row, name: v}, excluded)]
            if not fitting:
                break
            dice.shuffle(fitting)
            added = [
                sum(frozenset(((name, value), known)) in missing for known in row.items())
                for value in fitting
            ]
            row[name] = fitting[added.index(max(added))]
        else:
            return {name: row[name] for name in factors}
    raise ValueError(f"no row can have both of {start}: exclude the pair")
