"""Counting: a schedule's stages run against each other, checked, and the versions they meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .devices import one_by_one
from .generators import Generator
from .instructions import Instruction, Kind, ScheduleError
from .interleaving import bounded, interleave
from .ledger import Count, Ledger, Pair, open_ledgers
from .place import Place
from .reading import Reading, Rules

_FORWARD, _UPDATE = Kind.FORWARD, Kind.UPDATE


def follow(
    actions: Sequence[Iterable[Instruction]],
    ledgers: Sequence[Ledger],
    minibatches: int | None = None,
    devices: Sequence[int] | None = None,
) -> Iterator[tuple[int, list[Instruction], list[Pair]]]:
    """The turns of all stages, run against each other and entered into their ledgers.

    Args:
        actions: of every stage, as for ``interleave``.
        ledgers: of every stage.
        minibatches: the length of the run.
        devices: of every stage, where they have several and their turns come in ``device_order``.

    Yields:
        (stage, some of its turns, what each computes with), in an order in which they can run.

    Raises:
        ScheduleError: as ``interleave`` and the ledgers raise it.
    """
    order = interleave(actions, minibatches)
    if devices is not None:
        order = ((k, [turn]) for k, turn in one_by_one(actions, devices, minibatches))
    for k, run in order:
        yield k, run, ledgers[k].enter(run)
    for ledger in ledgers:
        ledger.close(minibatches)


def validate(
    actions: Sequence[Iterable[Instruction]],
    *,
    minibatches: int | None = None,
    microbatches: int | None = None,
    windows: Sequence[int] | None = None,
    rules: Sequence[Rules] | None = None,
) -> list[Count]:
    """Run the actions of all stages against each other, computing nothing, and count.

    Checked are: there is nothing but computation; what a stage waits for is sent, and what is sent
    is received, in the same order; no stages wait for each other for ever;
    every microbatch has exactly one forward and one backward, whole or in two halves, in this
    order, and every minibatch an update after its last backward, in the order of minibatches; no
    stage has more microbatches in flight than its window; no version of the weights is read before
    it exists or after it was dropped.

    Args:
        actions: of every stage; finite, or endless with ``minibatches``. They are read lazily: the
            memory it takes does not grow with the length of the run.
        minibatches: the length of the run.
        microbatches: the number that every minibatch must have, None to allow any.
        windows: the most microbatches in flight on every stage, None to allow any number.
        rules: which weights the method has every stage compute with; None: the newest.

    Returns:
        What every stage's actions come to.

    Raises:
        ScheduleError: names the stage, the action, and what was expected.
        ValueError: ``windows`` or ``rules`` has another length than ``actions``.
    """
    ledgers = open_ledgers(len(actions), rules, windows, microbatches)
    deque(follow(actions, ledgers, minibatches), maxlen=0)
    return [ledger.count for ledger in ledgers]


def check_generator(generate: Generator, places: Sequence[Place]) -> None:
    """Raise unless a generator's actions can be run, and every update is of one minibatch alone.

    Some minibatches are looked at, enough for any window to be full and for its steady state. Both
    halves of a backward have the update before and after them in common: so they meet one version,
    and the first may add gradients as well (of what cannot be put off).

    Args:
        generate: the generator.
        places: of all stages, with the windows that their actions have to keep to.

    Raises:
        ScheduleError: as ``validate``; or a backward adds to the gradient of another minibatch.
        TypeError: it gives something else than actions.
    """
    stages, microbatches = len(places), places[0].microbatches
    minibatches = max(place.window for place in places) // microbatches + 6
    for place in places:
        for action in generate(place):
            if not isinstance(action, Instruction):
                raise TypeError(
                    f"expected actions one by one, got {action!r} for stage {place.stage} of "
                    f"{stages}: 'yield from forward(place, i, j)' gives those of a forward"
                )
            break
    windows = [place.window for place in places]
    made = [generate(place) for place in places]
    validate(made, minibatches=minibatches, microbatches=microbatches, windows=windows)
    for place in places:
        updates = 0
        for turn in bounded(generate(place), place.stage, minibatches):
            updates += turn.kind is _UPDATE
            if turn.kind not in (_FORWARD, _UPDATE) and turn.minibatch != updates:
                due = Instruction(_UPDATE, updates)
                raise ScheduleError(place.stage, turn, f"expected {due} before it")


class Met(NamedTuple):
    """The weights that a microbatch's forward and its backward computed with on one stage."""

    minibatch: int
    microbatch: int
    forward: Reading
    backward: Reading


def read(
    actions: Sequence[Iterable[Instruction]],
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
            elif kind is not _UPDATE and kind is not Kind.BACKWARD_WEIGHTS:
                yield k, Met(i, j, Reading(*forwards[k].pop((i, j))), Reading(*reading))
