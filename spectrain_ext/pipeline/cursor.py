"""Cursor: where a stage stands in its actions, in a run whose length shows only as it goes."""

from __future__ import annotations

from collections.abc import Iterator

from spectrain_ext.schedule.instructions import Instruction, Kind


class Extent:
    """How long a run is, shared by the cursors of all its stages.

    Args:
        in_flight: minibatches that may be in flight at once.

    Attributes:
        minibatches: their number, None while it is not known.
        added: minibatches so far.
        shares: per minibatch in flight, the share of its samples that each microbatch has.
    """

    def __init__(self, in_flight: int) -> None:
        self.minibatches: int | None = None
        self.shares: dict[int, list[float]] = {}
        # A stage may come to the end of a minibatch when stage 0 has a window of others in flight.
        self._remembered = 2 * in_flight
        self.added = 0

    def add(self, shares: list[float]) -> None:
        """There is one more minibatch; a small one has fewer microbatches than the schedule."""
        self.shares[self.added] = shares
        self.shares.pop(self.added - self._remembered, None)
        self.added += 1

    def stop(self) -> None:
        """There are no more minibatches than those added."""
        self.minibatches = self.added


class Cursor:
    """The head of one stage's stream, without the actions that the run turned out not to have.

    The microbatches of a minibatch are known before a stage reaches its second one: the stage has
    received the first, or pulled the minibatch.

    Args:
        actions: the endless stream.
        extent: the run.
    """

    def __init__(self, actions: Iterator[Instruction], extent: Extent) -> None:
        self._actions = actions
        self._extent = extent
        self._head: Instruction | None = None
        self.advance()

    def head(self) -> Instruction | None:
        """The action to run next; None when the stage has finished."""
        extent = self._extent
        while self._head is not None:
            kind, i, j = self._head
            # As far as is known now; a call for it takes as long again, for every action.
            if (extent.minibatches is None or i < extent.minibatches) and (
                j == 0 or j < len(extent.shares[i])
            ):
                break
            # Updates come in the order of minibatches: nothing follows a dropped one.
            if kind is Kind.UPDATE:
                self._head = None
            else:
                self.advance()
        return self._head

    def advance(self) -> None:
        self._head = next(self._actions, None)
