"""Which versions of the weights every microbatch meets, counted from actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .actions import Action, Kind
from .interleaving import interleave
from .ledger import Entries, Ledger, Pair, Reading, Rules

_FORWARD, _UPDATE = Kind.FORWARD, Kind.UPDATE


def follow(
    actions: Sequence[Iterable[Action]],
    ledgers: Sequence[Ledger],
    minibatches: int | None = None,
) -> Iterator[tuple[int, list[Action], list[Pair]]]:
    """The turns of all stages, run against each other and entered into their ledgers.

    Args:
        actions: of every stage, as for ``interleave``.
        ledgers: of every stage.
        minibatches: the length of the run.

    Yields:
        (stage, some of its turns, what each computes with), in an order in which they can run.

    Raises:
        ScheduleError: as ``interleave`` and the ledgers raise it.
    """
    for k, run in interleave(actions, minibatches):
        yield k, run, ledgers[k].enter(run)
    for ledger in ledgers:
        ledger.close(minibatches)


def open_ledgers(
    stages: int,
    rules: Sequence[Rules] | None = None,
    windows: Sequence[int] | None = None,
    microbatches: int | None = None,
) -> list[Ledger]:
    """A ledger per stage.

    Args:
        stages: their number.
        rules: of every stage; None: the newest weights, forward and backward.
        windows: of every stage, None to allow any.
        microbatches: the number that every minibatch must have, None to allow any.

    Raises:
        ValueError: ``rules`` or ``windows`` has another length.
    """
    for name, values in (("rules", rules), ("windows", windows)):
        if values is not None and len(values) != stages:
            raise ValueError(f"{name}: expected one per stage, {stages}, got {len(values)}")
    entries: Entries = {}
    return [
        Ledger(
            k,
            stages,
            Rules() if rules is None else rules[k],
            window=None if windows is None else windows[k],
            microbatches=microbatches,
            entries=entries,
        )
        for k in range(stages)
    ]


class Met(NamedTuple):
    """The weights that a microbatch's forward and its backward computed with on one stage."""

    minibatch: int
    microbatch: int
    forward: Reading
    backward: Reading


def read(
    actions: Sequence[Iterable[Action]],
    rules: Sequence[Rules] | None = None,
    minibatches: int | None = None,
) -> Iterator[tuple[int, Met]]:
    """What every microbatch meets on every stage, as (stage, Met), lazily, in order of backwards.

    Raises:
        ScheduleError: the schedule cannot be run.
    """
    ledgers = open_ledgers(len(actions), rules)
    forwards: list[dict[tuple[int, int], Pair]] = [{} for _ in actions]
    for k, run, readings in follow(actions, ledgers, minibatches):
        for (kind, i, j), reading in zip(run, readings, strict=True):
            if kind is _FORWARD:
                forwards[k][i, j] = reading
            elif kind is not _UPDATE:
                yield k, Met(i, j, Reading(*forwards[k].pop((i, j))), Reading(*reading))


def updates_between(actions: Iterable[Action], first: Action, second: Action) -> int:
    """The updates that a stage makes after one of its actions and before a later one.

    Args:
        actions: of the stage, read up to ``second``.
        first: one of them.
        second: another, not before the first; an update does not count itself.

    Raises:
        ValueError: they end without both, or ``second`` comes first.
    """
    updates = None
    for action in actions:
        if action == first:
            updates = 0
        if action == second:
            if updates is None:
                raise ValueError(f"second: {second} comes before {first}")
            return updates
        if updates is not None and action.kind is _UPDATE and action != first:
            updates += 1
    missing = ("first", first) if updates is None else ("second", second)
    raise ValueError(f"{missing[0]}: the actions have no {missing[1]}")
