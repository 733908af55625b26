"""Stage: what one stage does in each action, on its own streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Value
from .rng import StageRandom
from .schedule import Cursor, Extent, Kind
from .transport import Buffer, Edge, Message, Slot, Transit, new_stream
from .versions import Content
from .weights import StageWeights


class _Entry(torch.autograd.Function):
    """Identity at a stage's input: a layer may work in place on its output, not on a leaf."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Tape:
    """What a stage keeps of a microbatch from its forward to the end of its backward.

    Attributes:
        buffer: stands for the memory of all of this.
        leaves: the inputs, None where no gradient is wanted.
        output: where the backward starts: the module's output, on the last stage then the loss.
        message: the output without its graph.
        slot: the receive buffer that the inputs are in.
        target: that of the loss's target, on the last stage.
    """

    __slots__ = ("buffer", "leaves", "message", "output", "slot", "target")
    target: Slot

    def __init__(
        self,
        slot: Slot,
        buffer: Buffer,
        leaves: list[Tensor | None],
        output: Value,
        message: Message,
    ) -> None:
        self.slot = slot
        self.buffer = buffer
        self.leaves = leaves
        self.output = output
        self.message = message


class Stage:
    """A module with all that it needs to run: weights, random numbers, streams, edges, tapes.

    Computation is issued to one stream, whatever writes weights (loads and updates) to another,
    and events order the two. Methods named like a schedule's action run it, for minibatch ``i`` and
    microbatch ``j``.

    Args:
        index: its index, counted from 0.
        module: computes the stage's output.
        device: where it does.
        weights: None if it has no trainable parameters.

    Attributes:
        peak: the most microbatches that were in flight here at once.
        inputs: the edge that the forward's input comes in by.
        gradients: the edge that the backward's gradient comes in by, None for the last stage.
        targets: the edge that the loss's target comes in by, None for all but the last stage.
        to_next: the next stage's ``inputs``, None for the last stage.
        to_previous: the previous stage's ``gradients``, None for the first stage.
    """

    inputs: Edge
    gradients: Edge | None = None
    targets: Edge | None = None
    to_next: Edge | None = None
    to_previous: Edge | None = None
    cursor: Cursor

    def __init__(
        self, index: int, module: nn.Module, device: torch.device, weights: StageWeights | None
    ) -> None:
        self.index = index
        self.module = module
        self.device = device
        self.weights = weights
        self.compute = new_stream(f"compute stream of stage {index}", device)
        self.predict = new_stream(f"prediction stream of stage {index}", device)
        self.computed = self.compute.event()
        self.loaded = self.predict.event()
        # What the two streams and the caller use in turn, for the streams that check that.
        self.working = Buffer(f"working weights of stage {index}")
        self.weight_gradients = Buffer(f"weight gradients of stage {index}")
        self.module_buffers = Buffer(f"module buffers of stage {index}")
        self._random = StageRandom(index, device)
        self._tapes: dict[tuple[int, int], _Tape] = {}
        self.peak = 0
        self._received: Slot
        self._outgoing: tuple[Tensor | None, ...] = ()
        self._in_transit = Transit(self.compute, 1)
        self._extent: Extent

    # A run.

    def begin(self, cursor: Cursor, extent: Extent) -> None:
        """Start a run with the weights that the module holds."""
        self.cursor = cursor
        self._extent = extent
        if self.weights is not None:
            self.predict.writes(self.working)
            with self.predict:
                self.weights.begin()
            self._weights_written()

    def end(self) -> None:
        """Put the true weights back into the module."""
        self._in_transit.reset()
        if self.weights is not None:
            self.predict.writes(self.working)
            with self.predict:
                self.weights.end()
            self.predict.record(self.loaded)

    def drop(self) -> None:
        """Forget what is in flight; the streams have been waited for."""
        self._tapes.clear()
        self._outgoing = ()
        for edge in self.edges():
            edge.reset()

    def edges(self) -> list[Edge]:
        """The edges that end here."""
        return [e for e in (self.inputs, self.gradients, self.targets) if e is not None]

    # Weights.

    def load_forward(self, i: int, j: int) -> None:
        """Have the weights of the microbatch's forward in the module."""
        if self.weights is not None:
            self._load(self.weights, self.weights.for_forward(i, j))

    def load_backward(self, i: int, j: int) -> None:
        """Have the weights of the microbatch's backward in the module."""
        if self.weights is not None:
            self._load(self.weights, self.weights.for_backward(i, j))

    def _load(self, weights: StageWeights, content: Content) -> None:
        if not weights.holds(content):
            predict = self.predict
            predict.wait(self.computed)
            predict.writes(self.working)
            with predict:
                weights.load(content)
            self._weights_written()
        weights.settle()

    def _weights_written(self) -> None:
        """What is computed from here on follows the weights just written."""
        self.predict.record(self.loaded)
        self.compute.wait(self.loaded)

    def update(self, i: int, j: int) -> None:
        """Step the optimizer."""
        weights = self.weights
        if weights is None:
            return
        upcoming = self.cursor.head()
        forward = None
        if upcoming is not None and upcoming.kind in _STARTS_FORWARD:
            forward = upcoming.minibatch, upcoming.microbatch
        predict = self.predict
        predict.wait(self.computed)
        predict.reads(self.weight_gradients)
        predict.writes(self.working)
        with predict:
            weights.update(forward)
        self._weights_written()
        self.compute.writes(self.weight_gradients)  # freed: their memory is that stream's again

    # Forward.

    def receive_activation(self, i: int, j: int) -> None:
        """Take the input, or the batch, as it arrives."""
        self._received = self.inputs.receive()

    def forward(self, i: int, j: int) -> None:
        """Compute the output."""
        slot = self._received
        message = slot.message
        assert message is not None
        compute = self.compute
        compute.reads(self.working)
        compute.writes(slot.buffer)  # an in-place first layer does
        compute.writes(self.module_buffers)
        leaves: list[Tensor | None] = []
        values: list[Tensor] = []
        with compute, torch.enable_grad(), self._random:
            for tensor, differentiable in zip(message.tensors, message.differentiable, strict=True):
                assert tensor is not None
                value = tensor.detach()
                leaf = None
                if differentiable:
                    leaf = value.requires_grad_()
                    value = _Entry.apply(leaf)  # type: ignore[no-untyped-call]
                leaves.append(leaf)
                values.append(value)
            output = self.module(values[0] if message.single else tuple(values))
        tape = _Tape(slot, Buffer("activations"), leaves, output, activation(output))
        compute.writes(tape.buffer)
        compute.record(self.computed)
        self._tapes[i, j] = tape
        self.peak = max(self.peak, len(self._tapes))

    def send_activation(self, i: int, j: int) -> None:
        """Copy the output to the next stage."""
        assert self.to_next is not None
        tape = self._tapes[i, j]
        self.to_next.send(tape.message, tape.buffer, self.computed)

    def loss(self, i: int, j: int, loss_fn: Callable[..., Tensor]) -> Tensor:
        """Compute the loss of a microbatch on the last stage; returns it detached."""
        assert self.targets is not None
        tape = self._tapes[i, j]
        tape.target = slot = self.targets.receive()
        message = slot.message
        assert message is not None
        target = message.tensors[0] if message.single else message.tensors
        compute = self.compute
        compute.writes(slot.buffer)
        with compute, torch.enable_grad(), self._random:
            loss = loss_fn(tape.output, target)
        _check_loss(loss, tape.message)
        tape.output = loss
        compute.writes(tape.buffer)
        compute.record(self.computed)
        return loss.detach()

    # Backward.

    def receive_gradient(self, i: int, j: int) -> None:
        """Take the gradient of the output as it arrives."""
        assert self.gradients is not None
        self._received = self.gradients.receive()

    def backward(self, i: int, j: int) -> None:
        """Compute the gradients of weights and input."""
        tape = self._tapes.pop((i, j))
        compute = self.compute
        compute.reads(self.working)
        compute.reads(tape.buffer)
        compute.writes(self.weight_gradients)
        with compute:
            if self.gradients is None:
                loss, share = tape.output, self._extent.shares[i][j]
                assert isinstance(loss, Tensor)
                roots = [loss] if loss.requires_grad else []
                seeds = [None if share == 1.0 else torch.full_like(loss, share)]
            else:
                slot = self._received
                message = slot.message
                assert message is not None
                compute.reads(slot.buffer)
                outputs = tape.output if isinstance(tape.output, tuple) else (tape.output,)
                # No gradient comes back for what does not require one or nothing depends on.
                seeds = [seed for seed in message.tensors if seed is not None]
                roots = [
                    output
                    for output, seed in zip(outputs, message.tensors, strict=True)
                    if seed is not None
                ]
            if roots:
                torch.autograd.backward(roots, seeds)
        self._outgoing = tuple(None if leaf is None else leaf.grad for leaf in tape.leaves)
        compute.writes(tape.buffer)  # freed
        compute.record(self.computed)
        self.inputs.free(tape.slot)
        if self.gradients is not None:
            self.gradients.free(self._received)
        elif self.targets is not None:
            self.targets.free(tape.target)

    def send_gradient(self, i: int, j: int) -> None:
        """Copy the gradient of the input to the previous stage."""
        assert self.to_previous is not None
        buffer = Buffer("gradients of the input")
        self.compute.writes(buffer)
        self.compute.record(self.computed)
        outgoing, self._outgoing = self._outgoing, ()
        read = self.to_previous.send(Message(outgoing), buffer, self.computed)
        self._in_transit.hold(read, buffer, outgoing)


_STARTS_FORWARD = (Kind.PULL, Kind.LOAD_FORWARD)


def activation(value: object) -> Message:
    """What to send of a stage's output, or of a batch's side.

    Raises:
        TypeError: it is neither a tensor nor a tuple of tensors.
    """
    if isinstance(value, Tensor):
        return Message((value.detach(),), True, (value.requires_grad,))
    if not isinstance(value, tuple) or not all(isinstance(tensor, Tensor) for tensor in value):
        inside = (
            ", ".join(type(member).__name__ for member in value) if isinstance(value, tuple) else ""
        )
        raise TypeError(
            "a stage must return a tensor or a tuple of tensors, got a "
            f"{type(value).__name__}{inside and f' of {inside}'}"
        )
    return Message(
        tuple(tensor.detach() for tensor in value),
        False,
        tuple(tensor.requires_grad for tensor in value),
    )


def _check_loss(loss: object, output: Message) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a 0-d tensor, got a {type(loss).__name__}")
    if loss.dim():
        raise ValueError(
            "loss_fn must return a scalar (a 0-d tensor), got shape "
            f"{tuple(loss.shape)}: take its mean"
        )
    if not loss.requires_grad and any(output.differentiable):
        raise ValueError("loss_fn returned a loss that does not depend on the output by autograd")
