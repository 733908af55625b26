"""Defines the instructions that schedules consist of, and their steps."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from .place import Place


class Kind(Enum):
    """The instructions of schedules and their steps; the value is the name in errors and traces.

    Each has its handler and what that does, for microbatch j of minibatch i.

    Example:
        >>> from spectrain_ext.schedule import Kind
        >>> Kind.BACKWARD_INPUT.value
        'backward of the input'
    """

    # BatchSource.pull: batch = next(batches), or end the run
    #     for part in split(batch): send its input to stage 0, its target to the last stage
    PULL = "pull"
    # Loads._loading: content = versions.for_forward(i, j)
    #     write it into a free buffer, unless one holds it; point the parameters there
    LOAD_FORWARD = "load forward weights"
    # Lender.send_weights: unless they are the last forward's:
    #     send the tied weights that this forward reads
    SEND_TIED_WEIGHTS = "send tied weights"
    # Compute._receive_activation: message = receive from the previous stage, or end
    #     for each pass: message = pass.received_activation(i, j, message)
    RECEIVE_ACTIVATION = "receive activation"
    # Borrower.receive_weights: receive, if the owner has sent new ones
    #     point the copies at the weights received last
    RECEIVE_TIED_WEIGHTS = "receive tied weights"
    # Compute._forward: output = module(input)
    #     tapes[i, j] = input, output and its graph
    FORWARD = "forward"
    # Compute._send_activation: for each pass: pass.sends_activation(i, j, message)
    #     send the output to the next stage
    SEND_ACTIVATION = "send activation"
    # Losses.loss: loss += share * loss_fn(output, target)
    #     after the last microbatch: results.append(loss / count)
    LOSS = "loss"
    # Loads._loading: content = versions.for_backward(i, j), as LOAD_FORWARD
    LOAD_BACKWARD = "load backward weights"
    # Compute._receive_gradient: message = receive from the next stage
    #     for each pass: message = pass.received_gradient(i, j, message)
    RECEIVE_GRADIENT = "receive gradient"
    # Borrower.load_weights: point the copies at the weights of their forward
    LOAD_TIED_WEIGHTS = "load tied weights"
    # Compute._recompute: restore the forward's random state and module buffers
    #     output = module(input), with a graph; on the last stage the loss as well
    RECOMPUTE = "recompute"
    # Ranks.handlers: before a minibatch's last backward: GradientSum.expect()
    #     the backward then sends each bucket of gradients as soon as it is complete
    EXPECT_SUM = "expect the gradients that are summed"
    # Compute._backward: tape = tapes.pop((i, j)); autograd.backward(output, gradient)
    #     free the received input and gradient
    BACKWARD = "backward"
    # Loads._loading: as LOAD_BACKWARD; the second half reads these weights too
    LOAD_BACKWARD_INPUT = "load weights of the input's backward"
    # Compute._backward_input: compute the gradient of the input
    #     tape.rest = the call that computes the other gradients
    BACKWARD_INPUT = "backward of the input"
    # Compute._backward_weights: tape = tapes.pop((i, j)); tape.rest()
    #     free the received input and gradient
    BACKWARD_WEIGHTS = "backward of the weights"
    # Borrower.free_weights: free the forward's tied weights after their last use
    FREE_TIED_WEIGHTS = "free tied weights"
    # CheckFinite._check_gradient: note whether the input's gradient is finite
    #     after the last microbatch: the weights' gradients as well
    CHECK_GRADIENT = "check the gradient that goes back"
    # Compute._send_gradient: for each pass: pass.sends_gradient(i, j, message)
    #     send the input's gradient, and the count, to the previous stage
    SEND_GRADIENT = "send gradient"
    # Borrower.send_gradients: send the copies' gradients to the owner, and clear them
    SEND_TIED_GRADIENTS = "send tied gradients"
    # Lender.add_gradients: for each tied p: p.grad += receive from the copy's stage
    ADD_TIED_GRADIENTS = "add tied gradients"
    # _sum_up: GradientSum.send_rest(count)
    #     p.grad, loss, count = their sums over replicas, by GradientSum.finish()
    SUM_GRADIENTS = "sum gradients over replicas"
    # Updates._divide: where losses are sums: p.grad /= count
    DIVIDE = "divide gradients by the count"
    # CheckFinite._check: if the loss or a gradient is not finite: raise, or skip
    #     without a flush only: to skip, undo the minibatch's forwards on this stage
    CHECK_FINITE = "check for non-finite numbers"
    # Updates._send_norm: GlobalNorm.give(norm of the gradients, what passes tell)
    SEND_NORM = "send norm"
    # CheckFinite._agree: if any stage has found a non-finite number: skip
    #     to skip, undo the minibatch's forwards on this stage
    AGREE = "agree whether to update"
    # Updates._clip: norm = of this stage, or GlobalNorm.take()
    #     p.grad *= min(1, max_norm / (norm + 1e-6))
    CLIP = "clip"
    # _Correction._change: p.grad = corrected(p.grad, W - W_stale)
    CHANGE_GRADIENTS = "change gradients"
    # AverageWeights._send: averager.before(weights), which begins to exchange them
    SEND_WEIGHTS = "send weights to replicas"
    # Updates._update: update = versions.begin_update(the next forward)
    #     StageWeights.step(update): W = optimizer(W, p.grad), and the next forward's prediction
    UPDATE = "update"
    # AverageWeights._average_in: averager.made(weights)
    #     weights = averager.after(weights), which waits for the other replicas
    AVERAGE = "average weights over replicas"
    # Ranks.handlers: results.append(the loss, if ShareLoss has brought it)
    REPORT = "report to the caller"
    # measuring: in an evaluation: measure(output, target)
    MEASURE = "metrics"
    # Compute._receive_word: in an evaluation: receive an empty message
    RECEIVE_WORD = "hear that the next stage is through"
    # Compute._send_word: in an evaluation: send an empty message
    SEND_WORD = "tell the previous stage that this one is through"

    # Members are singletons: hashing by identity keeps the executor's dispatch out of Python code.
    __hash__ = object.__hash__


#: The kinds of instructions; ``lowering.ORDER`` has the steps of each.
COMPUTE = frozenset(
    (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS, Kind.UPDATE)
)


class Instruction(NamedTuple):
    """An instruction of a stage, or one of its steps; ``microbatch`` is 0 for a whole minibatch.

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
