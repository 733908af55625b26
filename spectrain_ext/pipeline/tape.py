"""Tape: what a stage keeps of a microbatch, and what it may hand on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from spectrain_ext.rng import States
from spectrain_ext.transport import VALUES, Buffer, Message, Slot, tensors_in, tensors_of


class Entry(torch.autograd.Function):
    """Identity at a stage's input: a layer may work in place on its output, not on a leaf."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Tape:
    """What a stage keeps of a microbatch from its forward to the end of its backward."""

    __slots__ = (
        *("arrived", "buffer", "found", "leaves", "loss_fn", "message", "output", "rest", "slot"),
        *("states", "target"),
    )
    leaves: Sequence[Tensor | None]  # the inputs, None where no gradient is wanted
    output: Any  # where the backward starts: the module's output, on the last stage then the loss
    message: Message  # the output without its graph, where it goes on to another stage
    arrived: Slot  # with the output's gradients, on the last stage with the target
    target: Any
    rest: Callable[[], None] | None  # the second half of a backward, if there is anything to do
    # Only where the forward is to be run again: random numbers, module buffers, and the loss.
    states: States
    found: list[ModuleBuffers]
    loss_fn: Callable[..., Tensor] | None

    def __init__(self, slot: Slot, buffer: Buffer) -> None:
        self.slot = slot  # with the inputs
        self.buffer = buffer  # stands for the memory of all of this
        self.loss_fn = None


class Targets:
    """The targets of one minibatch, on the last stage, in one receive buffer."""

    __slots__ = ("left", "parts", "slot")

    def __init__(self, slot: Slot, parts: list[Any]) -> None:
        self.slot, self.parts = slot, parts
        self.left = len(parts)  # microbatches whose backwards have not ended


class ModuleBuffers:
    """A module's buffers as they are now; what is no module has none.

    Inside ``with`` the module has copies of them. A graph that is made there keeps these, and what
    the module had before is put back as it was.
    """

    def __init__(self, module: object) -> None:
        modules = module.modules() if isinstance(module, nn.Module) else ()
        held = (owner._buffers for owner in modules if owner._buffers)
        self._found = [(buffers, dict(buffers)) for buffers in held]
        tensors = {t for _, found in self._found for t in found.values() if t is not None}
        # Copies of all: ``.data`` and kernels of torch's norms write what autograd does not see.
        self._kept = {tensor: tensor.detach().clone() for tensor in tensors}
        self._now: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        copies = {tensor: kept.clone() for tensor, kept in self._kept.items()}
        self._now = [dict(held) for held, _ in self._found]
        for held, found in self._found:
            for name, tensor in found.items():
                held[name] = None if tensor is None else copies[tensor]

    def __exit__(self, *raised: object) -> None:
        for (held, _), now in zip(self._found, self._now, strict=False):
            for name, tensor in now.items():
                held[name] = tensor
        self._now = []  # what is done may be repeated


class ModuleModes:
    """Which parts of a module are in training."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modes = [(part, part.training) for part in module.modules()]
        self._switched = False

    def evaluate(self) -> None:
        if any(training for _, training in self._modes):
            self._module.eval()
            self._switched = True

    def restore(self) -> None:
        """Put all of it into the mode that it was in; may be repeated."""
        try:
            if self._switched and self._modes[0][1]:
                self._module.train()  # which may do more than to set what follows
            self._switched = False
        finally:
            for part, training in self._modes:
                part.training = training


# A forward.


def run_on(module: nn.Module, message: Message, entry: bool) -> tuple[list[Tensor | None], Any]:
    """The leaves that a module's output depends on, and the output."""
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
    return leaves, module(values[0] if message.single else packed(message, values))


def copied_out(value: Any, message: Message) -> Any:
    """A value that does not lie in a receive buffer: copies of its tensors that do."""
    lent = {t.untyped_storage().data_ptr() for t in message.tensors if t is not None}

    def lies_there(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in lent

    def moved(tensor: Tensor) -> Tensor:
        return tensor.clone() if lies_there(tensor) else tensor

    if isinstance(value, Tensor):
        return moved(value)
    value = tree_map_only(Tensor, moved, value)
    if any(map(lies_there, tensors_in(value))):  # in a dataclass, which torch does not look into
        value = copy.deepcopy(value)
    return value


def activation(value: object) -> Message:
    """What to send of a stage's output, or of a batch's side."""
    if isinstance(value, Tensor):
        return Message((value.detach(),), True, (value.requires_grad,))
    keys, tensors = None, value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        keys, tensors = tuple(value), tuple(value.values())
    if not isinstance(tensors, tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise _not_to_be_sent(value)
    return Message(
        tuple(tensor.detach() for tensor in tensors),
        False,
        tuple(tensor.requires_grad for tensor in tensors),
        keys,
    )


def _not_to_be_sent(value: object) -> TypeError:
    inside = ""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key!r}: {type(member).__name__}" for key, member in value.items())
    elif isinstance(value, tuple):
        inside = ", ".join(type(member).__name__ for member in value)
    return TypeError(
        f"a stage must return {VALUES}, to the stage after it; got a "
        f"{type(value).__name__}{inside and f' of {inside}'}. What the last stage returns may be "
        "anything that loss_fn takes"
    )


def packed(message: Message, tensors: Sequence[Tensor | None]) -> Any:
    """Tensors as a module or a loss takes the message's: itself, a tuple, or a dict."""
    if message.single:
        return tensors[0]
    if message.keys is None:
        return tuple(tensors)
    return dict(zip(message.keys, tensors, strict=True))


# What torch.autograd.backward calls once it has compared the shapes of outputs and seeds in Python,
# which took 19 us of a small backward in a pipeline. Here a seed has its output's shape: it is the
# gradient of a copy of it.
_run_backward = torch.autograd.Variable._execution_engine.run_backward


#: Where a backward starts, with the gradients that came there.
Pairs = Sequence[tuple[Tensor | GradientEdge, Tensor]]


def seeded(output: Any, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """The tensors of an output that a backward starts with, each with the gradient that it got."""
    if isinstance(output, Tensor):
        (seed,) = gradients
        return [(output, seed)] if seed is not None and output.requires_grad else []
    outputs = tensors_of(output)
    return [
        (tensor, seed)
        for tensor, seed in zip(outputs, gradients, strict=True)
        if seed is not None and tensor.requires_grad
    ]


def differentiate(pairs: Pairs, leaves: Sequence[Tensor] = (), keep: bool = False) -> None:
    """Add gradients to leaves, none: to all; ``keep`` the graph for another backward."""
    if pairs:
        outputs, seeds = zip(*pairs, strict=True)
        _run_backward(
            outputs, seeds, keep, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
        )


def check_loss(loss: object) -> None:
    """Raise TypeError or ValueError unless it is a 0-d tensor of real numbers."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a 0-d tensor, got a {type(loss).__name__}")
    if loss.is_complex():
        raise TypeError(f"loss_fn must return a real number, got {loss.dtype}: take its abs()")
    if loss.dim():
        raise ValueError(
            "loss_fn must return a scalar (a 0-d tensor), got shape "
            f"{tuple(loss.shape)}: take its mean"
        )


def check_dependence(loss: Tensor, output: object) -> None:
    """Raise ValueError if nothing can be learned from the loss."""
    if not loss.requires_grad and any(tensor.requires_grad for tensor in tensors_in(output)):
        raise ValueError("loss_fn returned a loss that does not depend on the output by autograd")
