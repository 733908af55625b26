"""Action: one step of a stage's work, as a value; ScheduleError: one that cannot be."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a stage does in one action; the value is its name in errors and traces."""

    PULL = "pull"
    LOAD_FORWARD = "load forward weights"
    RECEIVE_ACTIVATION = "receive activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    LOSS = "loss"
    LOAD_BACKWARD = "load backward weights"
    RECEIVE_GRADIENT = "receive gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send gradient"
    UPDATE = "update"

    # Members are singletons: hashing by identity is right and keeps the executor's dispatch out of
    # Python code.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One action of one stage; ``microbatch`` is 0 where the kind concerns the whole minibatch."""

    kind: Kind
    minibatch: int
    microbatch: int = 0

    def __str__(self) -> str:
        whole = self.kind is Kind.PULL or self.kind is Kind.UPDATE
        part = "" if whole else f", microbatch {self.microbatch}"
        return f"{self.kind.value} of minibatch {self.minibatch}{part}"


class ScheduleError(ValueError):
    """A schedule that cannot be run, or would compute something else than it should.

    Attributes:
        stage: index of the stage, counted from 0.
        action: the action of its schedule where that shows.
        reason: what was expected, and what was found.
    """

    def __init__(self, stage: int, action: Action, reason: str) -> None:
        super().__init__(stage, action, reason)  # these args make it picklable
        self.stage = stage
        self.action = action
        self.reason = reason

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.action}: {self.reason}"
