"""Templates: the numbers of every parameter group, read again once a group has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectrain_ext import _C

from .ledger import Group
from .rule import Rule

_IMMUTABLE = (float, int, str, type(None))


class Templates:
    """What a rule read from the groups; asking costs a comparison while they are as they were.

    A value that may change in place, such as a learning rate in a tensor, is read every time.
    """

    def __init__(self, rule: Rule[Any]) -> None:
        self._rule = rule
        self._seen: tuple[tuple[Any, ...], ...] | None = None
        self._numbers: list[Any] = []

    def of(self, groups: Sequence[Group]) -> list[Any]:
        """Return the numbers of every group, the same list while nothing has changed.

        Raises ValueError or TypeError for a number out of range.
        """
        if self._seen is None or not _C.same(groups, self._seen):
            self._seen = None
            self._numbers = [self._rule.read(index, group) for index, group in enumerate(groups)]
            if all(map(_stays, groups)):
                self._seen = tuple(tuple(group.values()) for group in groups)
        return self._numbers


def _stays(group: Group) -> bool:
    for key, value in group.items():
        inside = value if type(value) is tuple else (value,)
        if key != "params" and not all(isinstance(v, _IMMUTABLE) for v in inside):
            return False
    return True
