"""Which version every forward and backward meets, counted from actions, not from a formula."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .actions import Action, Kind


class Versions(NamedTuple):
    """Updates made before a minibatch's forward weights and its backward weights were loaded."""

    forward: int
    backward: int


def count_versions(actions: Iterable[Action]) -> dict[int, Versions]:
    """The versions that each minibatch of one stage's (finite) actions meets.

    Raises:
        ValueError: a minibatch has a backward and no forward before it.
    """
    updates = 0
    forward: dict[int, int] = {}
    counted: dict[int, Versions] = {}
    for action in actions:
        i = action.minibatch
        if action.kind is Kind.LOAD_FORWARD:
            forward[i] = updates
        elif action.kind is Kind.LOAD_BACKWARD:
            if i not in forward:
                raise ValueError(f"minibatch {i}: its backward comes before its forward")
            counted[i] = Versions(forward[i], updates)
        elif action.kind is Kind.UPDATE:
            updates += 1
    return counted
