"""Holds what a stage keeps of a microbatch, and runs its forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from spectrain_ext.rng import States
from spectrain_ext.transport import Buffer, Header, Message, Microbatches, Receiver, Slot
from spectrain_ext.transport.message import TENSOR, flattened, is_dense, tensors_in, unflattened
from spectrain_ext.weights.storage import local_part, whole

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
    """What a stage keeps of a microbatch from its forward to the end of its backward."""

    leaves: Sequence[Tensor | None]  # the inputs, None where no gradient is needed
    output: Any  # where the backward starts: the module's output, or the loss on the last stage
    message: Message  # the output without its graph, if it goes to another stage
    arrived: Slot  # the slot of the output's gradients, or of the target on the last stage
    # On the last stage: all targets of the minibatch and this one's, the loss's weight in that of
    # the minibatch, and what it is a sum over.
    targets: Targets
    target: Any
    weight: float
    count: Tensor | None
    rest: Callable[[], None] | None  # the second half of the backward; None: nothing is left
    # Only with recomputation: random numbers, module buffers, and the loss.
    states: States
    module_buffers: list[ModuleBuffers]
    loss_fn: Callable[..., Any] | None

    def __init__(self, slot: Slot, buffer: Buffer) -> None:
        self.slot = slot  # of the inputs
        self.header: Header = slot.header  # goes on with the output
        self.buffer = buffer  # stands for the memory of all of this
        self.loss_fn = self.count = None


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


class ModuleBuffers:
    """A copy of a module's buffers; an object that is not a module has none.

    Inside ``with``, the module has these copies, and a graph made there keeps them. At the end the
    module gets back the buffers that it had.
    """

    def __init__(self, module: object) -> None:
        modules = module.modules() if isinstance(module, nn.Module) else ()
        self._original = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
        tensors = {t for _, original in self._original for t in original.values() if t is not None}
        # Copy them all: ``.data`` and the kernels of torch's norms write unnoticed by autograd.
        self._kept = {tensor: tensor.detach().clone() for tensor in tensors}
        self._now: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        copies = {tensor: kept.clone() for tensor, kept in self._kept.items()}
        self._now = [dict(buffers) for buffers, _ in self._original]
        for buffers, original in self._original:
            for name, tensor in original.items():
                buffers[name] = None if tensor is None else copies[tensor]

    def __exit__(self, *raised: object) -> None:
        for (buffers, _), now in zip(self._original, self._now, strict=False):
            buffers.update(now)
        self._now = []  # so that a second call does nothing

    def restore(self) -> None:
        """Put the values back; call this when no graph needs the buffers any more."""
        for buffers, original in self._original:
            buffers.update(original)
        for tensor, value in self._kept.items():
            tensor.copy_(value)

    def restore_finite(self, later: Sequence[ModuleBuffers]) -> None:
        """Put back values that became non-finite, in ``later`` copies too; graphs stay valid."""
        for held, original in self._original:
            copies = [(c._kept, had) for c in later for other, had in c._original if other is held]
            for name, tensor in original.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                value = self._kept[tensor]
                others = (kept[t] for kept, had in copies if (t := had.get(name)) is not None)
                for now in (held[name], *others):
                    if now is not None and now.shape == value.shape:
                        lost = value.isfinite() & ~now.isfinite()
                        now.data.copy_(torch.where(lost, value, now))


class ModuleModes:
    """The training modes of a module and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modes = [(part, part.training) for part in module.modules()]
        self._switched = False

    def evaluate(self) -> None:
        if any(training for _, training in self._modes):
            self._module.eval()
            self._switched = True

    def restore(self) -> None:
        """Put every submodule back into its mode; may be repeated."""
        try:
            if self._switched and self._modes[0][1]:
                self._module.train()  # which may be overridden and do more
            self._switched = False
        finally:
            for part, training in self._modes:
                part.training = training


@contextmanager
def changing_modes(what: str) -> Iterator[None]:
    """Turn the error of a module that torch.export made into one that says what to do."""
    try:
        yield
    except NotImplementedError as error:
        raise RuntimeError(
            f"{what} cannot change between training and evaluation ({error}), as one of "
            "torch.export; give the module that was exported, which partition can trace"
        ) from error


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
    """Return the output's tensors that a backward starts at, with their gradients.

    And the count, which is the last of the gradients if the loss is a sum, otherwise None.
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


def checked_loss(returned: object, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the loss, a real 0-d tensor, and its count if it is a sum."""
    loss: Any = returned
    count: Any = None
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, count = returned
    loss, count = whole(loss), whole(count)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss_fn must return a 0-d tensor, or a pair (sum, count), got a "
            f"{type(returned).__name__}: return the tensor, not its item(), or a tuple of two"
        )
    if loss.is_complex():
        raise TypeError(f"loss_fn must return a real number, got {loss.dtype}: take its abs()")
    if loss.dim():
        raise ValueError(
            "loss_fn must return a scalar (a 0-d tensor), got shape "
            f"{tuple(loss.shape)}: take its mean"
        )
    if count is None:
        return loss, None
    # The count becomes a float64 tensor, without a CPU wait for the device.
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        if count.requires_grad:
            raise ValueError(
                "loss_fn returned a pair, which is (sum, count), and the count requires a "
                "gradient: return two losses as one, their sum, and a sum of weights without its "
                "graph, by detach()"
            )
        if not count.is_cpu:
            return loss, count.detach().reshape(()).to(device, torch.float64, non_blocking=True)
        count = count.item()
    if isinstance(count, (int, float)):
        check_count(count, "loss_fn returned a pair, which is (sum, count), and the count")
        return loss, torch.full((), count, dtype=torch.float64, device=device)
    what = f"shape {tuple(count.shape)}" if isinstance(count, Tensor) else type(count).__name__
    raise TypeError(
        f"the count of a pair (sum, count) must be a number or a 0-d tensor, got {what}; keep= "
        "takes what is returned beside a loss"
    )


def check_count(count: float, what: str) -> None:
    """Refuse what no sum of losses can be divided by; 0 is allowed, the mean of nothing."""
    if not 0 <= count < inf:
        raise ValueError(f"{what} is {count}: expected a number of samples, or a sum of weights")


def check_dependence(loss: Tensor, output: object) -> None:
    """Raise ValueError if the loss does not depend on the output by autograd."""
    if not loss.requires_grad and any(tensor.requires_grad for tensor in tensors_in(output)):
        raise ValueError(
            "loss_fn returned a loss that does not depend on the output by autograd: compute it "
            "from the output, without detach(), no_grad() or argmax()"
        )
