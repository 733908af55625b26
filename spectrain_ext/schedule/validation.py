"""Validation: whether a schedule can be run, and computes what it should."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .actions import Action
from .counting import follow, open_ledgers
from .ledger import Count, Rules


def validate(
    actions: Sequence[Iterable[Action]],
    *,
    minibatches: int | None = None,
    microbatches: int | None = None,
    windows: Sequence[int] | None = None,
    rules: Sequence[Rules] | None = None,
) -> list[Count]:
    """Run the actions of all stages against each other, computing nothing, and count.

    Checked are: around every forward and backward what belongs to it (``turns``); every receive has
    its send, and every send its receive, in the same order; no stages wait for each other for ever;
    every microbatch has exactly one forward and one backward, in this order, and every minibatch an
    update after its last backward, in the order of minibatches; no stage has more microbatches in
    flight than its window; no version of the weights is read before it exists or after it was
    dropped.

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
