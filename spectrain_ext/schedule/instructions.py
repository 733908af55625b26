"""Defines instructions, the steps of a stage's work, and those that schedules consist of."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from .place import Place


class Kind(Enum):
    """Steps of a stage: the value is the name in errors and traces, the comment who runs it.

    docs/pipeline.md says what each does.

    Example:
        >>> from spectrain_ext.schedule import Kind
        >>> Kind.BACKWARD_INPUT.value
        'backward of the input'
    """

    PULL = "pull"  # Source
    LOAD_FORWARD = "load forward weights"  # Loads
    SEND_TIED_WEIGHTS = "send tied weights"  # Lender
    RECEIVE_ACTIVATION = "receive activation"  # Compute
    RECEIVE_TIED_WEIGHTS = "receive tied weights"  # Borrower
    FORWARD = "forward"  # Compute
    SEND_ACTIVATION = "send activation"  # Compute
    LOSS = "loss"  # Losses
    LOAD_BACKWARD = "load backward weights"  # Loads
    RECEIVE_GRADIENT = "receive gradient"  # Compute
    LOAD_TIED_WEIGHTS = "load tied weights"  # Borrower
    RECOMPUTE = "recompute"  # Compute
    EXPECT_SUM = "expect the gradients that are summed"  # Ranks
    BACKWARD = "backward"  # Compute
    LOAD_BACKWARD_INPUT = "load weights of the input's backward"  # Loads
    BACKWARD_INPUT = "backward of the input"  # Compute
    BACKWARD_WEIGHTS = "backward of the weights"  # Compute
    FREE_TIED_WEIGHTS = "free tied weights"  # Borrower
    CHECK_GRADIENT = "check the gradient that goes back"  # passes
    SEND_GRADIENT = "send gradient"  # Compute
    SEND_TIED_GRADIENTS = "send tied gradients"  # Borrower
    ADD_TIED_GRADIENTS = "add tied gradients"  # Lender
    SUM_GRADIENTS = "sum gradients over replicas"  # Ranks
    DIVIDE = "divide gradients by the count"  # Updates
    CHECK_FINITE = "check for non-finite numbers"  # passes
    SEND_NORM = "send norm"  # Updates
    AGREE = "agree whether to update"  # passes
    CLIP = "clip"  # Updates
    CHANGE_GRADIENTS = "change gradients"  # passes
    SEND_WEIGHTS = "send weights to replicas"  # passes
    UPDATE = "update"  # Updates
    AVERAGE = "average weights over replicas"  # passes
    REPORT = "report to the caller"  # Ranks
    MEASURE = "metrics"  # measuring
    RECEIVE_WORD = "hear that the next stage is through"  # Compute
    SEND_WORD = "tell the previous stage that this one is through"  # Compute

    # Members are singletons: hashing by identity keeps the executor's dispatch out of Python code.
    __hash__ = object.__hash__


#: The kinds that schedules consist of; ``lowering.ORDER`` adds the rest.
COMPUTE = frozenset(
    (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS, Kind.UPDATE)
)


class Instruction(NamedTuple):
    """One step of one stage; ``microbatch`` is 0 where the kind concerns the whole minibatch.

    Example:
        >>> from spectrain_ext.schedule import Instruction, Kind
        >>> str(Instruction(Kind.FORWARD, minibatch=2, microbatch=1))
        'forward of minibatch 2, microbatch 1'
    """

    kind: Kind
    minibatch: int
    microbatch: int = 0

    def __str__(self) -> str:
        whole = self.kind is Kind.PULL or self.kind is Kind.UPDATE
        microbatch = "" if whole else f", microbatch {self.microbatch}"
        return f"{self.kind.value} of minibatch {self.minibatch}{microbatch}"


class ScheduleError(ValueError):
    """A schedule that cannot run, or that would compute something wrong.

    Attributes:
        stage: index of the stage, from 0.
        instruction: the instruction at which the error shows.
        reason: what was expected, and what was found.
    """

    def __init__(self, stage: int, instruction: Instruction, reason: str) -> None:
        super().__init__(stage, instruction, reason)  # makes it picklable
        self.stage = stage
        self.instruction = instruction
        self.reason = reason

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.instruction}: {self.reason}"


def forward(place: Place, i: int, j: int) -> tuple[Instruction, ...]:
    """Return the forward of microbatch j of minibatch i.

    Example:
        >>> from spectrain_ext.schedule import Place, forward
        >>> [str(each) for each in forward(Place(0, 2, 2), 3, 0)]
        ['forward of minibatch 3, microbatch 0']
    """
    return (Instruction(Kind.FORWARD, i, j),)


def backward(place: Place, i: int, j: int) -> tuple[Instruction, ...]:
    """Return the backward of microbatch j of minibatch i, with the update after the last one.

    Example:
        >>> from spectrain_ext.schedule import Place, backward
        >>> [str(each) for each in backward(Place(0, 2, 2), 3, 0)]
        ['backward of minibatch 3, microbatch 0', 'update of minibatch 3']
    """
    return _ending(place, Instruction(Kind.BACKWARD, i, j))


def backward_input(place: Place, i: int, j: int) -> tuple[Instruction, ...]:
    """Return the first half of a backward: the input's gradient, which is sent on.

    Example:
        >>> from spectrain_ext.schedule import Place, backward_input
        >>> [str(each) for each in backward_input(Place(0, 2, 2), 3, 0)]
        ['backward of the input of minibatch 3, microbatch 0']
    """
    return (Instruction(Kind.BACKWARD_INPUT, i, j),)


def backward_weights(place: Place, i: int, j: int) -> tuple[Instruction, ...]:
    """Return the other half: the weights' gradients, with the update after the last one.

    Example:
        >>> from spectrain_ext.schedule import Place, backward_weights
        >>> [each.kind.name for each in backward_weights(Place(0, 2, 2), 3, 0)]
        ['BACKWARD_WEIGHTS', 'UPDATE']
    """
    return _ending(place, Instruction(Kind.BACKWARD_WEIGHTS, i, j))


def _ending(place: Place, backward: Instruction) -> tuple[Instruction, ...]:
    _, i, j = backward
    return (backward, Instruction(Kind.UPDATE, i)) if j == place.microbatches - 1 else (backward,)
