"""Templates: the numbers of every parameter group, read again once a group has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectrain_ext.optim.ledger import Group
from spectrain_ext.optim.rule import Rule

_IMMUTABLE = (float, int, str, type(None))


class Templates:
    """What a rule read from the groups; asking costs a comparison while they are as they were.

    A value that may change in place, such as a learning rate in a tensor, is read every time.
    """

    def __init__(self, rule: Rule[Any]) -> None:
        self._rule = rule
        self._seen: list[tuple[Any, ...]] | None = None
        self._numbers: list[Any] = []

    def of(self, groups: Sequence[Group]) -> list[Any]:
        """Return the numbers of every group, the same list while nothing has changed.

        Raises ValueError or TypeError for a number out of range.
        """
        now = [tuple(group.values()) for group in groups]
        if self._seen is None or not _same(now, self._seen):
            self._seen = None
            self._numbers = [self._rule.read(index, group) for index, group in enumerate(groups)]
            if all(map(_stays, groups)):
                self._seen = now
        return self._numbers


def _same(now: list[tuple[Any, ...]], seen: list[tuple[Any, ...]]) -> bool:
    try:
        return now == seen
    except (RuntimeError, ValueError):  # a tensor or an array where there was a number
        return False


def _stays(group: Group) -> bool:
    for key, value in group.items():
        inside = value if type(value) is tuple else (value,)
        if key != "params" and not all(isinstance(v, _IMMUTABLE) for v in inside):
            return False
    return True
