"""Cursor: where a stage stands in its schedule, in a run whose length shows only as it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spectrain_ext.schedule.instructions import Instruction, Kind
from spectrain_ext.transport import Header


class Cursor:
    """The compute instructions of one stage, without those that the run turns out not to have.

    A stage hears of a minibatch, and of the end of the run, with the messages of its forwards. The
    microbatches of a minibatch are known before the stage comes to its second one.

    Args:
        instructions: the schedule's, without an end.

    Attributes:
        minibatches: the length of the run; None while it is not known.
        added: minibatches so far.
        shares: of each minibatch in flight, the share of its samples that each microbatch has.
        headers: of each, what came with its first microbatch.
        current: the instruction that is being run, None between two of them.
        step: how many of the steps that it consists of have been made.
        upcoming: what comes after it, be it a part of the run or not.
        finished: whether the stage has been found to have nothing left to do.
    """

    def __init__(self, instructions: Iterator[Instruction]) -> None:
        self._instructions = instructions
        self.upcoming = next(instructions, None)
        self.minibatches: int | None = None
        self.added = 0
        self.shares: dict[int, Sequence[float]] = {}
        self.headers: dict[int, Header] = {}
        self.current: Instruction | None = None
        self.step = 0
        self.finished = False

    def add(self, shares: Sequence[float], header: Header) -> None:
        """There is one more minibatch; a small one has fewer microbatches than the schedule."""
        self.shares[self.added] = shares
        self.headers[self.added] = header
        self.added += 1

    def stop(self) -> None:
        """There are no more minibatches than those added."""
        self.minibatches = self.added

    def peek(self) -> Instruction | None:
        """What follows the current instruction, as far as is known now; None: nothing."""
        following = self.upcoming
        while following is not None:
            kind, i, j = following
            if (self.minibatches is None or i < self.minibatches) and (
                j == 0 or j < len(self.shares[i])
            ):
                break
            # Updates come in the order of minibatches: nothing follows one that is left out.
            following = None if kind is Kind.UPDATE else next(self._instructions, None)
            self.upcoming = following
        return following

    def take(self) -> Instruction | None:
        """Make what follows the current instruction; None: the stage has finished."""
        following = self.upcoming
        if (
            following is None
            or self.minibatches is not None
            or (following[2] and following[2] >= len(self.shares[following[1]]))
        ):
            following = self.peek()
        self.current, self.step = following, 0
        if following is None:
            self.finished = True
        else:
            self.upcoming = next(self._instructions, None)
        return following
