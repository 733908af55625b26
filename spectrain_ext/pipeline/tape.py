"""Tape: what a stage keeps of a microbatch, and what it may hand on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from spectrain_ext.rng import States
from spectrain_ext.transport import (
    TENSOR,
    Buffer,
    Header,
    Message,
    Slot,
    flattened,
    tensors_in,
    unflattened,
)


class Entry(torch.autograd.Function):
    """Identity at a stage's input: a layer may work in place on its output, not on a leaf.

    Or what is ``now`` in the input's place, with the gradient of an identity.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, now: Tensor | None = None) -> Tensor:
        return value.detach() if now is None else now.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Tape:
    """What a stage keeps of a microbatch from its forward to the end of its backward."""

    __slots__ = (
        *("arrived", "buffer", "count", "found", "header", "leaves", "loss_fn", "message"),
        *("output", "rest", "slot", "states", "target"),
    )
    leaves: Sequence[Tensor | None]  # the inputs, None where no gradient is wanted
    output: Any  # where the backward starts: the module's output, on the last stage then the loss
    message: Message  # the output without its graph, where it goes on to another stage
    arrived: Slot  # with the output's gradients, on the last stage with the target
    target: Any
    count: Tensor | None  # what the loss is a sum over, on the last stage
    rest: Callable[[], None] | None  # the second half of a backward, if there is anything to do
    # Only where the forward is to be run again: random numbers, module buffers, and the loss.
    states: States
    found: list[ModuleBuffers]
    loss_fn: Callable[..., Tensor] | None

    def __init__(self, slot: Slot, buffer: Buffer) -> None:
        self.slot = slot  # with the inputs
        self.header: Header = slot.header  # which goes on with the output
        self.buffer = buffer  # stands for the memory of all of this
        self.loss_fn = self.count = None


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

    def restore(self) -> None:
        """Put them back; graphs that need them have been used."""
        for held, found in self._found:
            held.update(found)
        for tensor, value in self._kept.items():
            tensor.copy_(value)

    def restore_finite(self) -> None:
        """Put back what was finite and is not any more; graphs that have saved it go on."""
        for held, found in self._found:
            for name, tensor in found.items():
                now = held[name]
                if now is None or tensor is None or not now.is_floating_point():
                    continue
                value = self._kept[tensor]
                if now.shape == value.shape:
                    lost = value.isfinite() & ~now.isfinite()
                    now.data.copy_(torch.where(lost, value, now))


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


def run_on(
    module: Callable[[Any], Any], message: Message, entry: bool
) -> tuple[list[Tensor | None], Any]:
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
    return leaves, module(values[0] if message.form == TENSOR else packed(message, values))


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
    """What to send of a stage's output."""
    if isinstance(value, Tensor):
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
    return Message(
        tuple(tensor.detach() for tensor in tensors),
        tuple(tensor.requires_grad for tensor in tensors),
        form,
    )


def packed(message: Message, tensors: Sequence[Tensor | None]) -> Any:
    """Tensors as a module or a loss takes the message's."""
    if message.form == TENSOR:
        return tensors[0]
    return unflattened(message.form, iter(tensors))


# What torch.autograd.backward calls once it has compared the shapes of outputs and seeds in Python,
# which took 19 us of a small backward in a pipeline. Here a seed has its output's shape: it is the
# gradient of a copy of it.
_run_backward = torch.autograd.Variable._execution_engine.run_backward


#: Where a backward starts, with the gradients that came there.
Pairs = Sequence[tuple[Tensor | GradientEdge, Tensor]]


def seeded(
    output: Any, gradients: Sequence[Tensor | None]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """The tensors of an output that a backward starts with, each with the gradient that it got.

    And the count, which comes last, where the loss is a sum.
    """
    outputs = (output,) if isinstance(output, Tensor) else (*tensors_in(output),)
    count = None
    if len(gradients) > len(outputs):
        *gradients, count = gradients
    pairs = [
        (tensor, seed)
        for tensor, seed in zip(outputs, gradients, strict=True)
        if seed is not None and tensor.requires_grad
    ]
    return pairs, count


def differentiate(pairs: Pairs, leaves: Sequence[Tensor] = (), keep: bool = False) -> None:
    """Add gradients to leaves, none: to all; ``keep`` the graph for another backward."""
    if pairs:
        outputs, seeds = zip(*pairs, strict=True)
        _run_backward(
            outputs, seeds, keep, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
        )


def checked_loss(found: object, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The loss, a 0-d tensor of a real number; with the count where it is a sum."""
    loss, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss_fn must return a 0-d tensor, or a pair (sum, count), got a "
            f"{type(found).__name__}"
        )
    if loss.is_complex():
        raise TypeError(f"loss_fn must return a real number, got {loss.dtype}: take its abs()")
    if loss.dim():
        raise ValueError(
            "loss_fn must return a scalar (a 0-d tensor), got shape "
            f"{tuple(loss.shape)}: take its mean"
        )
    return loss, None if count is None else as_count(count, device)


def as_count(count: object, device: torch.device) -> Tensor:
    """A count as a float64 tensor, without a wait for the device."""
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        return count.detach().reshape(()).to(device, torch.float64, non_blocking=True)
    if isinstance(count, (int, float)):
        return torch.full((), count, dtype=torch.float64, device=device)
    what = f"shape {tuple(count.shape)}" if isinstance(count, Tensor) else type(count).__name__
    raise TypeError(
        f"the count of a pair (sum, count) must be a number or a 0-d tensor, got {what}"
    )


def check_dependence(loss: Tensor, output: object) -> None:
    """Raise ValueError if nothing can be learned from the loss."""
    if not loss.requires_grad and any(tensor.requires_grad for tensor in tensors_in(output)):
        raise ValueError("loss_fn returned a loss that does not depend on the output by autograd")
