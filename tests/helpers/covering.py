"""Draws few rows that together have every required pair of values: a covering array."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Value = tuple[str, Any]  # of an axis
Row = dict[str, Any]


class Axes:
    """Axes of a test's settings, the combinations that exist, and rows that cover the pairs.

    Args:
        values: each axis with its values.
        excluded: combinations that no row has: for each axis named, some of its values.
        groups: each further axis with its source, and a group for every value of that.
        required: which pairs of axes and groups have to be covered; otherwise all pairs of axes.
        sensible: whether a whole row exists, beyond ``excluded``.
    """

    def __init__(
        self,
        values: Mapping[str, Iterable[Any]],
        excluded: Iterable[Mapping[str, Iterable[Any]]] = (),
        groups: Mapping[str, tuple[str, Mapping[Any, Any]]] | None = None,
        required: Iterable[tuple[str, str]] | None = None,
        sensible: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        self.values = {axis: tuple(options) for axis, options in values.items()}
        self.groups, self.sensible = groups or {}, sensible
        self._excluded = [
            {axis: frozenset(some) for axis, some in combination.items()}
            for combination in excluded
        ]
        self.required = dict.fromkeys(
            (one, other)
            for a, b in required or itertools.combinations(self.values, 2)
            for one, other in itertools.product(self._all(a), self._all(b))
            if any(self.fits(dict(pair)) for pair in self._starts(one, other))
        )

    def fits(self, row: Row) -> bool:
        """Return whether a row, perhaps incomplete, has none of the excluded combinations."""
        return not any(
            all(axis in row and row[axis] in some for axis, some in combination.items())
            for combination in self._excluded
        )

    def covering(self, seed: int = 0) -> list[Row]:
        """Return the rows, which are the same everywhere."""
        draw, rows = random.Random(seed), []
        wanted = dict(self.required)
        for pair in self.required:
            if pair in wanted:
                rows.append(self._row(pair, wanted, draw))
                for found in self.pairs(rows[-1]):
                    wanted.pop(found, None)
        return rows

    def drawn(self, seed: object, **fixed: Any) -> Row:
        """Return a random row with these values."""
        draw, row = random.Random(f"{seed} {fixed}"), None
        while row is None:
            row = self._filled(fixed, {}, draw)
        return row

    def pairs(self, row: Row) -> set[tuple[Value, Value]]:
        """Return the required pairs that a row has."""
        labels = [label for value in row.items() for label in self._labels(value)]
        return {pair for pair in itertools.permutations(labels, 2) if pair in self.required}

    def _row(
        self, pair: tuple[Value, Value], wanted: Mapping[tuple[Value, Value], None], draw: Any
    ) -> Row:
        starts = [row for row in map(dict, self._starts(*pair)) if self.fits(row)]
        for attempt in range(1000):
            row = self._filled(draw.choice(starts), {} if attempt > 5 else wanted, draw)
            if row is not None:
                return row
        raise AssertionError(f"no row has {pair}; exclude it")

    def _filled(
        self, start: Row, wanted: Mapping[tuple[Value, Value], None], draw: Any
    ) -> Row | None:
        """Add to these values those that cover most, or return None if they do not fit."""
        row = dict(start)
        rest = [axis for axis in self.values if axis not in row]
        draw.shuffle(rest)
        for axis in rest:
            options = [(axis, v) for v in self.values[axis] if self.fits({**row, axis: v})]
            if not options:
                return None
            draw.shuffle(options)
            known = [label for value in row.items() for label in self._labels(value)]

            def gain(value: Value, known: list[Value] = known) -> int:
                return sum(
                    (label, other) in wanted or (other, label) in wanted
                    for label in self._labels(value)
                    for other in known
                )

            row |= [max(options, key=gain)]
        row = {axis: row[axis] for axis in self.values}
        return row if self.sensible(row) else None

    def _starts(self, one: Value, other: Value) -> Iterable[tuple[Value, Value]]:
        return itertools.product(self._below(one), self._below(other))

    def _labels(self, value: Value) -> list[Value]:
        """Return an axis' value and its groups."""
        axis, x = value
        return [
            value, *((name, of[x]) for name, (source, of) in self.groups.items() if source == axis)
        ]  # fmt: skip

    def _below(self, label: Value) -> list[Value]:
        """Return the axis' values of a label, which may be a group."""
        name, x = label
        if name not in self.groups:
            return [label]
        axis, of = self.groups[name]
        return [(axis, v) for v in self.values[axis] if of[v] == x]

    def _all(self, name: str) -> list[Value]:
        """Return all labels of an axis or a group."""
        found = self.groups[name][1].values() if name in self.groups else self.values[name]
        return [(name, x) for x in dict.fromkeys(found)]


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
