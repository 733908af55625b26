"""Cursor: where a stage stands in its stream of actions, in a run whose length shows only as it goes."""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Kind


class Extent:
    """How long a run is, shared by the cursors of all its stages.

    Attributes:
        minibatches: their number, None while it is not known.
        parts: how many microbatches a minibatch in flight really has (a small one has fewer than asked for).
    """

    def __init__(self) -> None:
        self.minibatches: int | None = None
        self.parts: dict[int, int] = {}

    def holds(self, action: Action) -> bool:
        """Whether the action belongs to the run, as far as is known now."""
        _, i, j = action
        if self.minibatches is not None and i >= self.minibatches:
            return False
        return j == 0 or j < self.parts.get(i, j + 1)


class Cursor:
    """The head of one stage's stream, without the actions that the run turned out not to have."""

    def __init__(self, actions: Iterator[Action], extent: Extent) -> None:
        self._actions = actions
        self._extent = extent
        self._head: Action | None = next(actions, None)

    def head(self) -> Action | None:
        """The action to run next; None when the stage has finished."""
        action = self._head
        while action is not None and not self._extent.holds(action):
            # Updates come in the order of minibatches: past a dropped one there is nothing left to do.
            over = action.kind is Kind.UPDATE
            action = self._head = None if over else next(self._actions, None)
        return action

    def advance(self) -> None:
        """Go past the head."""
        self._head = next(self._actions, None)
