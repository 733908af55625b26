"""Work: a prepared step, which is made as a whole even where exceptions interrupt it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from spectrain_ext.operators.calls import make_noted
from spectrain_ext.operators.laws import Law
from spectrain_ext.operators.lists import bump_versions

from .ledger import State
from .rows import Rows
from .rule import Scalars


class Work(NamedTuple):
    """All that a step writes, with nothing left that could be refused.

    Attributes:
        parts: rows, the native call that updates them, and their scalar state after it.
        made: a note for each of these calls that has been made, in order.
        templates: the numbers of every group.
        law: of what the step writes beside, None: nothing.
    """

    parts: Sequence[tuple[Rows, Callable[[], None], list[Scalars]]]
    made: list[object]
    templates: list[Any]
    law: Law | None

    def do(self, state: State, bump: bool) -> bool:
        """Make the step, or what is left of it.

        Args:
            state: the optimizer's.
            bump: whether autograd is to know that the parameters have changed.

        Returns:
            Whether parameters now share their numbers with others than before.
        """
        changed = False
        for k, (rows, call, after) in enumerate(self.parts):
            if len(self.made) == k:
                make_noted(call, self.made)
            if self.law is not None:
                rows.write_rest(self.templates, self.law)
            rows.forget_gradients()
            if rows.updated_to(after, state):
                changed = True
            if bump:
                bump_versions(rows.updated())
        return changed

    def rest(self) -> Work:
        """The same without the predictions, which nobody will use."""
        return self._replace(law=None)

    def begun(self) -> Work:
        """The same without the calls that have not been made."""
        return self._replace(parts=self.parts[: len(self.made)])
