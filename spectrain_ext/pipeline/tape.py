"""Runs the forward and the backward of a microbatch, and records what the backward needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from spectrain_ext.rng import States
from spectrain_ext.transport import Buffer, Header, Message, Microbatches, Receiver, Slot
from spectrain_ext.transport.message import TENSOR, flattened, is_dense, tensors_in, unflattened
from spectrain_ext.weights.storage import local_part

from .module_state import ModuleBuffers

NOTHING_SENT = Message(())

_DESCRIBED = 200  # characters about what a module was called with


class Entry(torch.autograd.Function):
    """Identity at a stage's input: layers may work in place on its output, but not on a leaf.

    With ``now`` it returns that tensor, and passes the gradient to ``value`` unchanged.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, now: Tensor | None = None) -> Tensor:
        return value.detach() if now is None else now.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Tape:
    """The record of a microbatch on one stage, from its forward to the end of its backward.

    Attributes:
        slot: the receive slot of the inputs.
        header: arrived with the inputs, and goes on with the output.
        buffer: stands for the memory of all of this.
        leaves: the inputs, None where no gradient is needed.
        output: the start of the backward: the module's output, or the loss on the last stage.
        message: the output without its graph, for the next stage.
        states, module_buffers: random numbers and module buffers, for a recomputation.
        arrived: the slot of the output's gradients, or of the target on the last stage.
        loss: the part of the loss, on the last stage.
        rest: the second half of the backward; None: nothing is left.
    """

    def __init__(
        self,
        slot: Slot,
        buffer: Buffer,
        leaves: Sequence[Tensor | None],
        output: Any,
        message: Message,
        states: States | None = None,
        module_buffers: Sequence[ModuleBuffers] = (),
    ) -> None:
        self.slot, self.buffer, self.leaves = slot, buffer, leaves
        self.header: Header = slot.header
        self.output, self.message = output, message
        self.states, self.module_buffers = states, module_buffers
        self.arrived: Slot | None = None
        self.loss: LossPart | None = None
        self.rest: Callable[[], None] | None = None

    @property
    def memory(self) -> tuple[Buffer, ...]:
        """The memory that a backward reads."""
        assert self.arrived is not None
        return self.buffer, self.slot.buffer, self.arrived.buffer

    def forget_output(self) -> None:
        """Free the output, without whose graph nothing here needs it any more."""
        self.output, self.message = (), NOTHING_SENT
        self.buffer = Buffer("activations")  # for the recomputation

    def receive_gradients(self, slot: Slot) -> None:
        self.arrived = slot

    def receive_loss(self, part: LossPart, output: Any) -> None:
        """Start the backward at the loss, if ``output`` is one with a graph."""
        self.loss, self.arrived, self.output = part, part.targets.slot, output
        self.module_buffers = (*self.module_buffers, *part.module_buffers)

    def record_again(self, leaves: Sequence[Tensor | None], output: Any) -> None:
        """Start the backward at an output that was computed again."""
        self.leaves, self.output = leaves, output

    def put_off(self, rest: Callable[[], None] | None) -> None:
        self.rest = rest


@dataclass(frozen=True, slots=True)
class LossPart:
    """A microbatch's part of the loss of a minibatch.

    Attributes:
        targets: all targets of the minibatch.
        weight: the loss's weight in that of the minibatch.
        count: the divisor of a loss that is a sum, else None.
        module_buffers: those of a loss function that will be computed again.
        again: computes the loss of a recomputed output.
    """

    targets: Targets
    weight: float
    count: Tensor | None
    module_buffers: Sequence[ModuleBuffers]
    again: Callable[[Any], Tensor]


class Targets:
    """The targets of one minibatch in one receive buffer."""

    def __init__(self, edge: Receiver, slot: Slot) -> None:
        value = packed(slot.message, slot.message.tensors)
        self.parts = value if isinstance(value, Microbatches) else [value]
        self.slot, self._edge = slot, edge
        self._left = len(self.parts)  # microbatches whose backwards have not ended

    def note_used(self) -> None:
        """Note the end of a microbatch's backward; the last one frees the buffer."""
        self._left -= 1
        if not self._left:
            self._edge.free(self.slot)


# A forward.


def run_on(
    module: Callable[[Any], Any], message: Message, entry: bool
) -> tuple[list[Tensor | None], Any]:
    """Run a module on a message; return the leaves for the inputs' gradients, and the output."""
    leaves: list[Tensor | None] = []
    values: list[Tensor] = []
    for tensor, differentiable in zip(message.tensors, message.differentiable, strict=True):
        assert tensor is not None
        value = tensor.detach()
        leaf = None
        if differentiable:
            leaf = value.requires_grad_()
            if entry:  # layers may work in place on it
                value = Entry.apply(leaf)  # type: ignore[no-untyped-call]
        leaves.append(leaf)
        values.append(value)
    argument = values[0] if message.form == TENSOR else packed(message, values)
    try:
        return leaves, module(argument)
    except Exception as error:
        _note_values(error, input=argument)
        raise


def called(function: Callable[..., Any], **values: Any) -> Any:
    try:
        return function(*values.values())
    except Exception as error:
        _note_values(error, **values)
        raise


def _note_values(error: Exception, **values: Any) -> None:
    """Add a note about what a module or a loss was called with."""
    looks = tree_map_only(Tensor, lambda t: f"{t.dtype} of shape {tuple(t.shape)}", values)
    listed = (f"{name} {str(look)[:_DESCRIBED]}" for name, look in looks.items())
    error.add_note(f"called with {', '.join(listed)}")


def copied_out(value: Any, message: Message) -> Any:
    """Return the value with copies of those tensors that lie in the message's receive buffer."""
    lent = {_address(t) for t in message.tensors if t is not None} - {None}

    def lies_there(tensor: Tensor) -> bool:
        return _address(tensor) in lent

    value = tree_map_only(Tensor, lambda t: t.clone() if lies_there(t) else t, value)
    if any(map(lies_there, tensors_in(value))):  # in a dataclass, which tree_map does not enter
        value = copy.deepcopy(value)
    return value


def _address(tensor: Tensor) -> int | None:
    try:
        return local_part(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # of a collective's result that nobody has waited for
        return None


def activation(value: object) -> Message:
    if isinstance(value, Tensor) and is_dense(value):  # most are: the general way takes 0.6 us more
        return Message((value.detach(),), (value.requires_grad,), TENSOR)
    tensors: list[Tensor] = []
    try:
        form = flattened(value, "a stage's output", tensors)
        if not tensors:
            raise TypeError(f"a stage's output: expected a tensor in it, got {value!r}")
    except TypeError as error:
        raise TypeError(
            f"{error}. What the last stage returns may be anything that loss_fn takes"
        ) from None
    flags = tuple([tensor.requires_grad for tensor in tensors])
    return Message(tuple([tensor.detach() for tensor in tensors]), flags, form)


def packed(message: Message, tensors: Sequence[Tensor | None]) -> Any:
    """Return the tensors in the form of the message: what a module or a loss takes."""
    if message.form == TENSOR:
        return tensors[0]
    return unflattened(message.form, iter(tensors))


# torch.autograd.backward calls this after comparing the shapes of outputs and seeds in Python,
# which took 19 us of a small backward in a pipeline. Here a seed always has its output's shape: the
# seed is the gradient of a copy of the output.
_run_backward = torch.autograd.Variable._execution_engine.run_backward


#: Where a backward starts, with the gradients that arrived there.
Pairs = Sequence[tuple[Tensor | GradientEdge, Tensor]]


def seeded(
    output: Any, gradients: Sequence[Tensor | None]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """Return the output's tensors that a backward starts at, with their gradients, and the count.

    The count is the last of the gradients if the loss is a sum, otherwise None.
    """
    outputs, count = (output,) if isinstance(output, Tensor) else (*tensors_in(output),), None
    if len(gradients) > len(outputs):
        *gradients, count = gradients
    pairs = []
    for tensor, seed in zip(outputs, gradients, strict=True):
        if seed is not None and tensor.requires_grad:
            pairs.append((tensor, seed))
    return pairs, count


def differentiate(
    pairs: Pairs, leaves: Sequence[Tensor | GradientEdge] = (), keep: bool = False
) -> None:
    """Add gradients to the leaves, or to all if none are given; ``keep`` retains the graph."""
    if pairs:
        outputs, seeds = zip(*pairs, strict=True)
        _run_backward(
            outputs, seeds, keep, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
        )
