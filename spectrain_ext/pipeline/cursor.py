"""Defines ``Cursor``: the position of one stage in its schedule, in one run."""

from __future__ import annotations

from collections.abc import Iterator

from spectrain_ext.schedule import Instruction, Kind


class Cursor:
    """The position of one stage in its schedule, limited to the instructions that the run contains.

    A stage learns of a minibatch, and of the end of the run, from the messages of its forwards.
    """

    def __init__(self, instructions: Iterator[Instruction], microbatches: int) -> None:
        self._instructions = instructions  # of the schedule; endless
        self._microbatches = microbatches  # of each minibatch in the schedule
        self.limited = False  # whether the run may lack some of the schedule's instructions
        self.upcoming = next(instructions, None)  # whether or not the run contains it
        self.minibatches: int | None = None  # the length of the run, once it is known
        self.added = 0
        self.updated = 0  # minibatches that the stage has updated from
        # By minibatch in flight: each microbatch's share of the samples, 0 before it has arrived.
        self.shares: dict[int, list[float]] = {}
        self.finished = False  # whether the stage has nothing left to do

    def add(self, microbatches: int) -> None:
        """Add a minibatch; a small one has fewer microbatches than the schedule."""
        self.shares[self.added] = [0.0] * microbatches
        self.added += 1
        if microbatches < self._microbatches:
            self.limited = True

    def stop(self) -> None:
        """Note that no minibatches follow those added."""
        self.minibatches, self.limited = self.added, True

    def peek(self) -> Instruction | None:
        """Return the instruction that comes next, as far as is known now."""
        following = self.upcoming
        while following is not None:
            kind, i, j = following
            if (self.minibatches is None or i < self.minibatches) and (
                j == 0 or j < len(self.shares[i])
            ):
                break
            # Updates come in the order of minibatches: nothing follows one that the run lacks.
            following = None if kind is Kind.UPDATE else next(self._instructions, None)
            self.upcoming = following
        return following

    def take(self) -> Instruction | None:
        """Advance to the next instruction and return it; None: the stage has finished."""
        taken = self.peek() if self.limited else self.upcoming
        self.finished = taken is None
        if taken is not None:
            self.upcoming = next(self._instructions, None)
        return taken

    def end_minibatch(self, i: int) -> None:
        """Note that the stage has updated from it."""
        self.shares.pop(i, None)
        self.updated = i + 1
