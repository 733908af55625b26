"""Stage: what one stage does in each action, on its own streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.optim.guard import SaveGuard
from spectrain_ext.rng import TURN, StageRandom
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import (
    Buffer,
    Event,
    Message,
    Receiver,
    Sender,
    Slot,
    Transit,
    new_stream,
    tensors_of,
)
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.saved import SavedWeights
from spectrain_ext.weights.storage import Content, VersionBuffer

from .batch import samples_in
from .clipping import GlobalNorm, clip, gradient_norm
from .cursor import Cursor, Extent
from .halves import differentiate_inputs
from .names import bare
from .tape import (
    Entry,
    Tape,
    activation,
    check_dependence,
    check_loss,
    differentiate,
    packed,
    value_of,
)

#: What runs an action of a stage, for minibatch i and microbatch j.
Handler = Callable[[int, int], None]


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
        max_norm: what its gradient is clipped to, None: not at all.
        global_norm: where the norm is that of all stages; None: it is the stage's own.

    Attributes:
        peak: the most microbatches that were in flight here at once.
        guard: has whoever saves a module in a run hear of it.
        inputs: the edge that the forward's input comes in by.
        gradients: the edge that the backward's gradient comes in by, None for the last stage.
        targets: the edge that the loss's target comes in by, None for all but the last stage.
        to_next: the next stage's ``inputs``, None for the last stage.
        to_previous: the previous stage's ``gradients``, None for the first stage.
    """

    inputs: Receiver
    gradients: Receiver | None = None
    targets: Receiver | None = None
    to_next: Sender | None = None
    to_previous: Sender | None = None
    cursor: Cursor

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        weights: StageWeights | None,
        max_norm: float | None = None,
        global_norm: GlobalNorm | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.device = device
        self.compute = new_stream(f"compute stream of stage {index}", device)
        self.predict = new_stream(f"prediction stream of stage {index}", device)
        self.computed = self.compute.event()
        self.loaded = self.predict.event()
        # What the two streams and the caller use in turn, for the streams that check that.
        self.weight_gradients = Buffer(f"weight gradients of stage {index}")
        self.optimizer_state = Buffer(f"optimizer state of stage {index}")
        self.module_buffers = Buffer(f"module buffers of stage {index}")
        self._shared: tuple[Buffer, ...] = (self.module_buffers,)
        self._no_weights = Buffer(f"weights of stage {index}, which has none")
        self._gradients_read: tuple[Event, list[Tensor | None]] | None = None
        # On the CPU alone: what has been issued has been done.
        self._immediate = self.compute.immediate and self.predict.immediate
        self.random = StageRandom(index, device)
        self._trained = {name for name, p in module.named_parameters() if p.requires_grad}
        self.guard = SaveGuard(
            "a run of this pipeline has not ended, and its stages may hold predicted weights; take "
            "the pipeline's own state_dict(), which has the true ones, or save after the loop"
        )
        self._guarded: list[nn.Parameter] = []
        self.peak = 0
        self.split_dim = 0  # of the inputs' first tensor, and of what stages hand on
        self.train_by(weights, max_norm, global_norm)
        self._received: Slot
        self._in_place: bool | None = None  # whether the module works in place on its input
        self._in_transit = Transit(self.compute, 1)
        self._extent: Extent
        self.forget()

    def train_by(
        self,
        weights: StageWeights | None,
        max_norm: float | None,
        global_norm: GlobalNorm | None,
    ) -> None:
        """Compute with other versions of the weights, and clip otherwise, from the next run on."""
        self.weights = weights
        self._max_norm, self.global_norm = max_norm, global_norm
        self._follows: AbstractContextManager[object] = _NOTHING

    @property
    def working(self) -> Buffer:
        """What stands for the memory of the weights that the module has now."""
        weights = self.weights
        if weights is None or weights.storage is None:
            return self._no_weights
        return weights.storage.bound.memory

    @property
    def memory(self) -> tuple[Buffer, ...]:
        """All versions of the weights, and the optimizer's state."""
        weights = self.weights
        if weights is None or weights.storage is None:
            return (self.optimizer_state,)
        versions = weights.storage.version_buffers()
        return (self.optimizer_state, *(version.memory for version in versions))

    @property
    def shared(self) -> tuple[Buffer, ...]:
        """What the caller may use between two instructions."""
        return (*self.memory, *self._shared)

    def share(self, buffer: Buffer) -> None:
        """The caller may use this as well."""
        self._shared = (*self._shared, buffer)

    def handlers(self) -> dict[Kind, Handler]:
        """What runs each kind of action; of ``PULL`` and ``LOSS`` the neighbourhood knows."""
        return {
            Kind.LOAD_FORWARD: self.load_forward,
            Kind.RECEIVE_ACTIVATION: self.receive_activation,
            Kind.FORWARD: self.forward,
            Kind.SEND_ACTIVATION: self.send_activation,
            Kind.LOAD_BACKWARD: self.load_backward,
            Kind.RECEIVE_GRADIENT: self.receive_gradient,
            Kind.BACKWARD: self.backward,
            Kind.LOAD_BACKWARD_INPUT: self.load_backward_input,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHTS: self.backward_weights,
            Kind.SEND_GRADIENT: self.send_gradient,
            Kind.UPDATE: self.update,
        }

    # A run.

    def check(self) -> None:
        """Refuse parameters that left their buffer, or that are trainable and nobody trains."""
        if self.weights is not None:
            self.weights.check(self.index)
        for name, p in self.module.named_parameters():
            if p.requires_grad and name not in self._trained:
                raise ValueError(
                    f"stages[{self.index}]: parameter {bare(name)!r} has become trainable since "
                    "the pipeline was made, whose optimizer does not hold it; release() the "
                    "pipeline and make another one of the stages"
                )

    def begin(self, cursor: Cursor, extent: Extent) -> None:
        """Start a run with the weights that the module holds."""
        self.cursor = cursor
        self._extent = extent
        self.forget()
        if self.weights is not None:
            for stream in (self.compute, self.predict):
                stream.lend(self.weights.buffers())
            with self.predict.using(writes=self.memory):
                self.weights.begin()
            self._weights_written()
            self._follow_weights()
            self._guarded = [p for p in self.module.parameters() if p.requires_grad]
            self.guard.put(self._guarded)

    def end(self) -> None:
        """Put the true weights back into the module; may be repeated, or done without a begin."""
        self.random.leave()
        if self.weights is not None:
            self._gradients_read = None
            with self.predict.using(writes=self.memory):
                self.weights.end()
            self.predict.record(self.loaded)
            self.guard.take(self._guarded)
        self._in_transit.reset()

    def forget(self) -> None:
        self._tapes: dict[tuple[int, int], Tape] = {}
        # The gradients of the input, and what stands for their memory.
        self._outgoing: tuple[tuple[Tensor | None, ...], Buffer] | None = None
        self._gave: int | None = None  # minibatch whose norm the other stages know

    # Weights.

    def load_forward(self, i: int, j: int) -> None:
        if self.weights is not None:
            self._load(self.weights, self.weights.versions.for_forward(i, j))

    def load_backward(self, i: int, j: int) -> None:
        if self.weights is not None:
            self._load(self.weights, self.weights.versions.for_backward(i, j))

    def load_backward_input(self, i: int, j: int) -> None:
        if self.weights is not None:
            self._load(self.weights, self.weights.versions.for_backward(i, j, ends=False))

    def _load(self, weights: StageWeights, content: Content) -> None:
        """Compute with these weights from here on, which are written unless a buffer has them."""
        versions, storage = weights.versions, weights.storage
        assert storage is not None
        buffer = versions.find(content)
        if buffer is None:
            buffer = versions.room(content)
            predict = self.predict
            if buffer.read is not None:
                predict.wait(buffer.read)
            reads = self.optimizer_state, storage.true.memory
            with predict.using(reads=reads, writes=(buffer.memory,)):
                storage.write(content, buffer)
            self._written(buffer)
        if not buffer.followed:
            assert buffer.written is not None
            self.compute.wait(buffer.written)
            buffer.followed = True
        if buffer is not storage.bound:
            storage.point(buffer)
        versions.settle()

    def _written(self, *buffers: VersionBuffer) -> None:
        """Something has been written to these on the prediction stream."""
        for buffer in buffers:
            if buffer.written is None:
                buffer.written = self.predict.event()
            self.predict.record(buffer.written)
            buffer.followed = False
        self.predict.record(self.loaded)

    def _has_computed(self) -> None:
        """Something has been computed, with the weights that are bound."""
        compute = self.compute
        compute.record(self.computed)
        if self.weights is not None and self.weights.storage is not None:
            buffer = self.weights.storage.bound
            if buffer.read is None:
                buffer.read = compute.event()
            compute.record(buffer.read)

    def _weights_written(self) -> None:
        """What is computed from here on follows all weights just written."""
        self.predict.record(self.loaded)
        self.compute.wait(self.loaded)

    def _follow_weights(self) -> None:
        """A forward's graph finds the weights that its backward is to meet, if they are others."""
        weights = self.weights
        self._follows = _NOTHING
        if weights is not None and weights.meets_others and weights.storage is not None:
            self._follows = SavedWeights(weights.storage)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, an observer reads the weights, ordered with all that writes them.

        On the stream that does: no other stage and no communication is waited for.
        """
        with self.predict.using(reads=self.memory), torch.no_grad():
            yield

    def give_norm(self, i: int) -> None:
        """Tell the other stages the norm of this one's gradient, once."""
        assert self.global_norm is not None
        if self._gave == i:
            return
        predict, buffer = self.predict, Buffer(f"gradient norm of stage {self.index}")
        predict.wait(self.computed)
        params = () if self.weights is None else self.weights.params
        with predict.using(reads=(self.weight_gradients,), writes=(buffer,)):
            norm = gradient_norm(params, self.device)
        self.global_norm.give(i, self.index, norm, buffer, predict)
        self._gave = i

    def update(self, i: int, j: int) -> None:
        weights = self.weights
        if weights is None:
            return
        upcoming = self.cursor.head()
        forward = None
        if upcoming is not None and upcoming.kind in _STARTS_FORWARD:
            forward = upcoming.minibatch, upcoming.microbatch
        predict = self.predict
        predict.wait(self.computed)
        if self._max_norm is not None:
            self._clip(weights, self._max_norm, i)
        update, storage = weights.begin_update(forward), weights.storage
        assert storage is not None
        changed = {storage.true, update.kept or storage.true, update.room or storage.true}
        gradients = [p.grad for p in weights.params]
        reads = [self.weight_gradients]
        if update.stale is not None and update.stale not in changed:
            reads.append(update.stale.memory)
        writes = [self.optimizer_state, *(buffer.memory for buffer in changed)]
        with predict.using(reads=reads, writes=writes), TURN:
            weights.make(update)  # a hook may draw
        self._written(*changed)
        # Held until the compute stream has waited for the step: it would use their memory again.
        self._gradients_read = self.loaded, gradients
        if predict.immediate:
            self._free_gradients()

    def _clip(self, weights: StageWeights, max_norm: float, i: int) -> None:
        if self.global_norm is not None:
            norm = self.global_norm.take(i, self.predict, self.device)
        with self.predict.using(writes=(self.weight_gradients,)):
            if self.global_norm is None:
                norm = gradient_norm(weights.params, self.device)
            clip(weights.params, max_norm, norm)

    # Forward.

    def receive_activation(self, i: int, j: int) -> None:
        self._received = self.inputs.receive()

    @property
    def samples(self) -> int:
        """Of the microbatch that was received last: the size of its first tensor."""
        message = self._received.message
        assert message is not None
        return samples_in(message.tensors, self.split_dim) or 0

    def forward(self, i: int, j: int) -> None:
        slot = self._received
        message = slot.message
        assert message is not None
        tape = Tape(slot)
        # An in-place first layer writes the slot.
        writes = (slot.buffer, self.module_buffers, tape.buffer)
        compute = self.compute
        with (
            compute.using(reads=(self.working,), writes=writes),
            _grad_enabled(),
            TURN,
            self.random,
            self._follows,
        ):
            tape.leaves, tape.output = self._run(message)
        if self.to_next is not None:
            tape.message = activation(tape.output)
        if not self._immediate:
            self._has_computed()
        self._keep(i, j, tape)

    def _run(self, message: Message) -> tuple[list[Tensor | None], Any]:
        """The module's output, and the leaves that it depends on.

        Autograd lets no layer work in place on a leaf. The identity that stands between the two
        costs as much as a small layer: it stays only where the first forward needed it, and comes
        back should a later one need it.
        """
        if self._in_place is not False:
            before = _versions(message)
            found = self._run_on(message, entry=True)
            self._in_place = self._in_place or _versions(message) != before
            return found
        try:
            return self._run_on(message, entry=False)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
        self._in_place = True
        self.random.rewind()
        return self._run_on(message, entry=True)

    def _run_on(self, message: Message, entry: bool) -> tuple[list[Tensor | None], Any]:
        leaves: list[Tensor | None] = []
        values: list[Tensor] = []
        for tensor, differentiable in zip(message.tensors, message.differentiable, strict=True):
            assert tensor is not None
            value = tensor.detach()
            leaf = None
            if differentiable:
                leaf = value.requires_grad_()
                if entry:
                    value = Entry.apply(leaf)  # type: ignore[no-untyped-call]
            leaves.append(leaf)
            values.append(value)
        return leaves, self.module(values[0] if message.single else packed(message, values))

    def _keep(self, i: int, j: int, tape: Tape) -> None:
        self._tapes[i, j] = tape
        self.peak = max(self.peak, len(self._tapes))

    def send_activation(self, i: int, j: int) -> None:
        assert self.to_next is not None
        tape = self._tapes[i, j]
        self.to_next.send(tape.message, tape.buffer, self.computed)

    def loss(self, i: int, j: int, loss_fn: Callable[..., Tensor]) -> Tensor:
        """Compute the loss of a microbatch on the last stage; returns it detached."""
        tape, target = self._with_target(i, j)
        compute = self.compute
        writes = (tape.target.buffer, tape.buffer)
        with compute.using(writes=writes), _grad_enabled(), TURN, self.random, self._follows:
            loss = loss_fn(tape.output, target)
        check_loss(loss)
        check_dependence(loss, tape.output)
        tape.output = loss
        compute.record(self.computed)
        return loss.detach()

    def _with_target(self, i: int, j: int) -> tuple[Tape, Any]:
        assert self.targets is not None
        tape = self._tapes[i, j]
        tape.target = slot = self.targets.receive()
        assert slot.message is not None
        return tape, value_of(slot.message)

    # Backward.

    def receive_gradient(self, i: int, j: int) -> None:
        assert self.gradients is not None
        self._received = self.gradients.receive()

    def backward(self, i: int, j: int) -> None:
        tape = self._tapes.pop((i, j))
        arrived = tape.target if self.gradients is None else self._received
        self._differentiate(i, j, tape, arrived)
        self._finish(tape, arrived)

    def backward_input(self, i: int, j: int) -> None:
        """The gradients of the input, and what else cannot be put off."""
        tape = self._tapes[i, j]
        tape.gradient = tape.target if self.gradients is None else self._received
        tape.rest = self._differentiate(i, j, tape, tape.gradient, halves=True)
        if not self._immediate:
            self._has_computed()

    def backward_weights(self, i: int, j: int) -> None:
        """The gradients that ``backward_input`` has left."""
        tape = self._tapes.pop((i, j))
        if tape.rest is not None:
            reads = (self.working, tape.buffer, tape.slot.buffer, tape.gradient.buffer)
            writes = (self.weight_gradients, self.module_buffers)
            with self.compute.using(reads=reads, writes=writes), TURN:
                tape.rest()
        self._finish(tape, tape.gradient)

    def _finish(self, tape: Tape, arrived: Slot) -> None:
        """A backward has ended: let go of what it needed."""
        self.compute.writes(tape.buffer)  # freed
        if not self._immediate:
            self._has_computed()
        self.inputs.free(tape.slot)
        if self.gradients is not None:
            self.gradients.free(arrived)
        elif self.targets is not None:
            self.targets.free(arrived)

    def _differentiate(
        self, i: int, j: int, tape: Tape, arrived: Slot, halves: bool = False
    ) -> Callable[[], None] | None:
        """Issue the backward, which begins with the gradients or the target that arrived.

        With ``halves`` only that of the inputs; the other half is returned, if there is one.
        """
        if self._gradients_read is not None:
            self._free_gradients()
        outgoing = Buffer("gradients of the input")
        reads = (self.working, tape.buffer, tape.slot.buffer, arrived.buffer)
        # torch.utils.checkpoint runs layers again, and puts other random numbers there.
        writes = (self.weight_gradients, self.module_buffers, outgoing)
        with self.compute.using(reads=reads, writes=writes), TURN:  # a hook may draw
            if self.gradients is None:
                loss, share = tape.output, self._extent.shares[i][j]
                assert isinstance(loss, Tensor)
                pairs: list[tuple[Tensor, Tensor]] = []
                if loss.requires_grad:
                    pairs = [(loss, torch.full_like(loss, share))]
            else:
                message = arrived.message
                assert message is not None
                found = tape.output
                outputs = (found,) if isinstance(found, Tensor) else tensors_of(found)
                # No gradient comes back for what does not require one or nothing depends on.
                pairs = [
                    (output, seed)
                    for output, seed in zip(outputs, message.tensors, strict=True)
                    if seed is not None and output.requires_grad
                ]
            rest = None
            if halves:
                rest = differentiate_inputs(pairs, tape.leaves)
            else:
                differentiate(pairs)
        gradients = tuple(None if leaf is None else leaf.grad for leaf in tape.leaves)
        self._outgoing = gradients, outgoing
        return rest

    def _free_gradients(self) -> None:
        """Let the compute stream have the memory of gradients that an update has read."""
        if self._gradients_read is not None:
            stepped, _ = self._gradients_read
            self.compute.wait(stepped)
            self.compute.writes(self.weight_gradients)
            self._gradients_read = None

    def send_gradient(self, i: int, j: int) -> None:
        assert self.to_previous is not None
        assert self._outgoing is not None
        gradients, buffer = self._outgoing
        self._outgoing = None
        read = self.to_previous.send(Message(gradients), buffer, self.computed)
        self._in_transit.hold(read, buffer, gradients)


_STARTS_FORWARD = (Kind.PULL, Kind.LOAD_FORWARD)


_NOTHING = nullcontext()


def _grad_enabled() -> AbstractContextManager[object]:
    """``torch.enable_grad()``, and nothing where that is how it is."""
    return _NOTHING if torch.is_grad_enabled() else torch.enable_grad()


def _versions(message: Message) -> list[int]:
    return [0 if tensor is None else tensor._version for tensor in message.tensors]
