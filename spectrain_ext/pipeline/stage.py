"""Runs the instructions of one stage: its computations, receives and sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spectrain_ext.rng import RNG_LOCK, StageRandom
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import (
    NO_HEADER,
    Buffer,
    Header,
    Message,
    Microbatches,
    Slot,
    Transit,
)

from .edges import Cursor, StageEdges, received
from .loads import NOTHING, Loads
from .passes import Handler, Pass, hooks
from .tape import (
    ModuleBuffers,
    ModuleModes,
    Tape,
    Targets,
    activation,
    called,
    check_dependence,
    checked_loss,
    copied_out,
    differentiate,
    packed,
    run_on,
    seeded,
)

if TYPE_CHECKING:
    from spectrain_ext.weights import StageWeights

    from .recomputing import RecomputedBlocks


_NO_INPUTS = Message(())


class Mode(Enum):
    TRAIN = "train"
    EVALUATE = "evaluate"  # forwards only, modules in eval mode, with separate random numbers
    CALL = "call"  # forwards only, modules in the mode they are in


class Stage(Loads):
    """One stage: its module, weights, random numbers, streams and edges, and what it has in flight.

    A method named like an instruction runs it, for minibatch ``i`` and microbatch ``j``; ``loss``
    and ``measure`` also get what they call.

    With ``recomputes``, a forward keeps its inputs, the module's buffers and the state of the
    random numbers, but no graph. Before its backward the whole forward runs again, with the weights
    of the backward. Where these differ from the forward's weights, the whole gradient, activations
    included, is that of the backward's weights. The second forward reads and does not update the
    buffers, such as running statistics, that the first one found; the same holds for a loss that is
    a module. ``blocks`` are recomputed inside the backward of a stage that is not recomputed as a
    whole.
    """

    edges: StageEdges
    divided = False  # whether ``count`` gives the divisor of the losses in advance
    before = 0  # minibatches in earlier runs
    sent: list[int] | None = None  # bytes, to the next and the previous stage; None: not counted

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        weights: StageWeights | None,
        connections: Any,  # see ``Pass.on``
        passes: Sequence[Pass] = (),
        recomputes: bool = False,
        blocks: Mapping[str, nn.Module] | None = None,  # recomputed in the backward
    ) -> None:
        super().__init__(index, module, device, weights)
        self.random = StageRandom(index, device, connections.replica)
        self.recomputes = recomputes
        self._blocks: RecomputedBlocks | None = None
        if blocks:
            from .recomputing import RecomputedBlocks

            self._blocks = RecomputedBlocks(module, blocks)
        self._entered: Sequence[ModuleBuffers] = ()  # during a recomputation
        self._undone_before = 0  # by the training that this one continues
        self.peak = 0  # the most microbatches in flight at once
        self._mode = Mode.TRAIN
        self._modes: ModuleModes | None = None
        self._received: Slot
        self._in_place: bool | None = None  # whether the module modifies its input in place
        self._in_transit = Transit(self.compute)  # gradients that are being sent
        self._sent = Transit(self.compute)  # activations being sent that no tape holds
        self.passes = [each.on(self, connections) for each in passes]
        self._called, self._lost, self.finished, self._sends_activation, self._sends_gradient = (
            hooks(self.passes, name)
            for name in ("calls", "lost", "finished", "sends_activation", "sends_gradient")
        )
        # The last one's message arrives outermost.
        self._received_activation, self._received_gradient = (
            hooks(self.passes, name)[::-1] for name in ("received_activation", "received_gradient")
        )
        self._number_back, self._came_back, self._saving = (
            hooks(self.passes, name) for name in ("number_back", "came_back", "saving")
        )
        self.forget()

    def handlers(self) -> dict[Kind, Handler]:
        """Return what the stage does in this run, by the steps of its instructions."""
        edges = self.edges
        found: dict[Kind, Handler] = {
            Kind.RECEIVE_ACTIVATION: self.receive_activation,
            Kind.FORWARD: self.forward,
        }
        if edges.to_next:
            found[Kind.SEND_ACTIVATION] = self.send_activation
        if self._mode is not Mode.TRAIN:
            if edges.gradients:
                found[Kind.RECEIVE_WORD] = self.receive_word
            if edges.to_previous:
                found[Kind.SEND_WORD] = self.send_word
            return found
        found |= {
            Kind.LOAD_FORWARD: self.load_forward,
            Kind.LOAD_BACKWARD: self.load_backward,
            Kind.LOAD_BACKWARD_INPUT: self.load_backward_input,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHTS: self.backward_weights,
            Kind.DIVIDE: self.divide,  # only a computed loss shows whether it is a sum
            Kind.UPDATE: self.update,
        }
        if edges.gradients:
            found[Kind.RECEIVE_GRADIENT] = self.receive_gradient
        if edges.to_previous:
            found[Kind.SEND_GRADIENT] = self.send_gradient
        if self.recomputes:
            found[Kind.RECOMPUTE] = self.recompute
        if self.global_norm is not None:
            found[Kind.SEND_NORM] = self.send_norm
        if self.max_norm is not None:
            found[Kind.CLIP] = self.clip
        for steps in self._steps_of_passes:
            for kind, step in steps.items():
                own = found.get(kind)
                found[kind] = step if own is None else _both(own, step)
        return found

    # A run.

    def begin(self, cursor: Cursor, edges: StageEdges, mode: Mode) -> None:
        self.cursor, self.edges, self._mode = cursor, edges, mode
        self.forget()
        self._numbers: AbstractContextManager[object] = self.random
        self._keeps_graph = self.trains and not self.recomputes
        if self.trains:
            self.begin_weights(follows=bool(self._saving))
            self._steps_of_passes = [each.begin() for each in self.passes]
            for save in self._saving:
                self._follows = save(self._follows)
            if self._blocks is not None:
                self._blocks.begin()
            return
        self._numbers, self._modes = NOTHING, None
        if mode is Mode.EVALUATE:
            self._numbers = StageRandom(self.index, self.device)
            self._modes = ModuleModes(self.module)
            self._modes.evaluate()

    def end(self) -> None:
        """Put back what a run has changed; may be repeated, or called without a ``begin``."""
        if self._mode is not Mode.TRAIN:
            if isinstance(self._numbers, StageRandom):
                self._numbers.leave()
            if self._modes is not None:
                self._modes.restore()
        else:
            try:
                for found in self._entered:
                    found.__exit__()
                self._entered = ()
                if self._blocks is not None:
                    self._blocks.end()
                self._follows = NOTHING  # it would keep all buffers
                self.compute.record(self.computed)
            finally:
                self.random.leave()
                self.end_weights()
        self._in_transit.reset()
        self._sent.reset()

    def forget(self) -> None:
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._targets: dict[int, Targets] = {}
        # Inputs whose gradients go to the previous stage, the buffer that stands for their memory,
        # and the count that is sent with them.
        self._outgoing: tuple[Sequence[Tensor | None], Buffer, Tensor | None] | None = None
        self.counts = {}

    # Forward.

    def receive_activation(self, i: int, j: int) -> None:
        """Receive the next microbatch, or the end of the run, which goes on to the next stage."""
        edges = self.edges
        slot = edges.inputs[j].receive()
        if slot is None:
            edges.ended_by = edges.inputs[j]
            self.pass_on_end()
            return
        header = slot.header
        if j == 0:
            self.cursor.add(edges.microbatches_of(header))
        if self._received_activation and self.edges.to_previous:
            with self.computing(reads=(slot.buffer,)):
                for unpack in self._received_activation:
                    slot.message = unpack(slot.message)
        self.cursor.shares[i][j] = header.value
        self._received = slot

    def _as_sent(
        self, sends: Sequence[Any], i: int, j: int, message: Message, buffer: Buffer
    ) -> Message:
        """Return a message as passes send it; ``buffer`` stands for its memory."""
        with self.computing(writes=(buffer,)):
            for send in sends:
                message = send(i, j, message)
        self.compute.record(self.computed)
        return message

    def _count_bytes(self, message: Message, backward: bool) -> None:
        if self.sent is not None:
            self.sent[backward] += sum(t.nbytes for t in message.tensors if t is not None)

    @property
    def trains(self) -> bool:
        return self._mode is Mode.TRAIN

    def number_of(self, i: int) -> int:
        """Return a minibatch's number in all runs, without those of which nothing remained."""
        return i + self.before - self.undone if self.trains else i

    @property
    def undone(self) -> int:
        """Minibatches of all runs after which all was as if they had never come."""
        return self._undone_before + sum(each.undone for each in self.passes)

    def continue_after(self, undone: int) -> None:
        """Continue a training in which so many minibatches were undone."""
        self._undone_before += undone - self.undone

    def pass_on_end(self) -> None:
        self.cursor.stop()
        self.edges.end()

    @property
    def samples(self) -> int:
        """The samples of the microbatch received last."""
        return self._received.header.samples

    def forward(self, i: int, j: int) -> None:
        slot = self._received
        message = slot.message
        tape = Tape(slot, self._untracked or Buffer("activations"))
        graph = self._keeps_graph
        # A first layer that works in place writes the slot.
        writes = (slot.buffer, self.module_buffers, tape.buffer)
        with (
            self.computing(reads=(self.working,), writes=writes),
            NOTHING if graph and torch.is_grad_enabled() else torch.set_grad_enabled(graph),
            RNG_LOCK,
            self._numbers,
            self._follows,
        ):
            if self._called and self.trains:
                for call in self._called:
                    call(i, j, self.module, message)
            if graph:
                tape.leaves, tape.output = self._run(message)
            elif self._mode is Mode.TRAIN:
                tape.states = self.random.states()
                tape.found = [ModuleBuffers(self.module)]
                # Copies, since the second forward needs the inputs as they were.
                copies = [None if t is None else t.clone() for t in message.tensors]
                tape.output = called(self.module, input=packed(message, copies))
            else:
                value = packed(message, message.tensors)
                tape.output = copied_out(called(self.module, input=value), message)
        if self.edges.to_next:
            tape.message = activation(tape.output)
            if not graph and self._mode is Mode.TRAIN:
                learns = self.weights is not None or any(message.differentiable)
                tape.message = tape.message.with_gradient(learns)
        self._has_computed()
        self._tapes[i, j] = tape
        if self._mode is Mode.TRAIN:
            self.peak = max(self.peak, len(self._tapes))
        else:
            self.edges.inputs[j].free(slot)

    def _run(self, message: Message) -> tuple[list[Tensor | None], Any]:
        # Autograd allows no in-place operation on a leaf. The identity between the leaf and the
        # module costs as much as a small layer, so it stays only if the first forward needed it,
        # and comes back if a later one does.
        if self._in_place is not False:
            before = _versions(message)
            found = run_on(self.module, message, entry=True)
            self._in_place = self._in_place or _versions(message) != before
            return found
        try:
            return run_on(self.module, message, entry=False)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
        self._in_place = True
        self.random.rewind()
        return run_on(self.module, message, entry=True)

    def send_activation(self, i: int, j: int) -> None:
        tape = self._tapes[i, j]
        sends, to = self._sends_activation, self.edges.to_next[j]
        message, buffer = tape.message, tape.buffer
        if sends:
            buffer = Buffer("activations as passes send them")
            message = self._as_sent(sends, i, j, message, buffer)
        self._count_bytes(message, False)
        read = to.send(message, buffer, self.computed, header=tape.header)
        if sends or not self._keeps_graph:
            self._sent.hold(read, buffer, message)
        if self._keeps_graph:
            return
        # Without a graph, nothing here needs the output any more.
        tape.output, tape.message = (), Message(())
        tape.buffer = Buffer("activations")  # for the recomputation
        if self._mode is not Mode.TRAIN:
            del self._tapes[i, j]

    # The loss, on the last stage.

    def loss(
        self, i: int, j: int, loss_fn: Callable[..., Any], keep: Callable[..., Any] | None
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Return a microbatch's part of the loss, its count if any, and what ``keep`` returns."""
        tape = self._tapes[i, j]
        graph = self._keeps_graph
        targets = self._targets.get(i)
        if targets is None:
            slot = self._receive_target(j)
            with self.computing(reads=(slot.buffer,)):
                value = packed(slot.message, slot.message.tensors)
            parts = value if isinstance(value, Microbatches) else [value]
            targets = self._targets[i] = Targets(slot, parts)
        tape.arrived, tape.target = targets.slot, targets.parts[j]
        writes = (tape.arrived.buffer, tape.buffer)
        with (
            self.computing(writes=writes),
            torch.set_grad_enabled(graph),
            RNG_LOCK,
            self.random,
            self._follows,
        ):
            for call in self._called:
                call(i, j, loss_fn, _NO_INPUTS)
            if not graph:
                tape.found.append(ModuleBuffers(loss_fn))
                tape.loss_fn = loss_fn
            found = called(loss_fn, output=tape.output, target=tape.target)
            loss, count = checked_loss(found, self.device)
            kept = None if keep is None else keep(tape.output, tape.target)
            tape.count = None if self.divided else count
            weight = self.weight(tape, i, j)
            part = loss.detach() if weight == 1.0 else loss.detach() * weight
            if self.divided and not weight:
                part = part * nan  # the mean of nothing
            for note in self._lost:
                note(i, j, part)
        if graph:
            check_dependence(loss, tape.output)
            tape.output = loss
        self.compute.record(self.computed)
        return part, tape.count, kept

    def weight(self, tape: Tape, i: int, j: int) -> float:
        """Return a microbatch's weight in the loss of its minibatch; 1 for sums, divided later."""
        return self.cursor.shares[i][j] if tape.count is None else 1.0

    def measure(self, i: int, j: int, measure: Callable[..., Any]) -> None:
        tape, slot = self._tapes.pop((i, j)), self._receive_target(j)
        message = slot.message
        writes = slot.buffer, tape.buffer
        with self.computing(writes=writes), torch.no_grad(), RNG_LOCK, self._numbers:
            copies = [None if t is None else t.clone() for t in message.tensors]
            called(measure, output=tape.output, target=packed(message, copies))
        self.compute.record(self.computed)
        self.edges.targets[j].free(slot)
        self.compute.writes(tape.buffer)  # freed

    def _receive_target(self, j: int) -> Slot:
        return received(
            self.edges.targets[j], "the run has ended where batches come in, and a target"
        )

    # Backward.

    def receive_gradient(self, i: int, j: int) -> None:
        slot = received(self.edges.gradients[j], "the next stage has ended its run, and a gradient")
        if self._received_gradient:
            with self.computing(reads=(slot.buffer,)):
                for unpack in self._received_gradient:
                    slot.message = unpack(i, slot.message)
        self._tapes[i, j].arrived = slot
        for note in self._came_back:
            note(i, j, slot.header.value)

    def recompute(self, i: int, j: int) -> None:
        tape = self._tapes[i, j]
        message = tape.slot.message
        writes = [tape.slot.buffer, tape.buffer, self.module_buffers]
        if self.edges.targets:
            writes.append(tape.arrived.buffer)
        with (
            self.computing(reads=(self.working,), writes=writes),
            torch.enable_grad(),
            ExitStack() as held,
        ):
            self._entered = tape.found
            for found in reversed(tape.found):  # the loss may contain the module
                held.enter_context(found)
            with self.random.at(tape.states):
                tape.leaves, tape.output = self._run(message)
                if tape.loss_fn is not None:
                    loss, _ = checked_loss(tape.loss_fn(tape.output, tape.target), self.device)
                    check_dependence(loss, tape.output)
                    tape.output = loss
        self._entered = ()

    def backward(self, i: int, j: int) -> None:
        tape = self._tapes.pop((i, j))
        self._differentiate(i, j, tape)
        self._finish(i, j, tape)

    def backward_input(self, i: int, j: int) -> None:
        """Compute the gradients of the input, and those that cannot wait."""
        tape = self._tapes[i, j]
        # A recomputed graph is differentiated as a whole: it should not live until the second half.
        halves = not self.recomputes and self._blocks is None
        tape.rest = self._differentiate(i, j, tape, halves)
        self._has_computed()

    def backward_weights(self, i: int, j: int) -> None:
        tape = self._tapes.pop((i, j))
        if tape.rest is not None:
            reads = (self.working, tape.buffer, tape.slot.buffer, tape.arrived.buffer)
            writes = (self.weight_gradients, self.module_buffers)
            with self.computing(reads=reads, writes=writes), RNG_LOCK:
                tape.rest()
        self._finish(i, j, tape)

    def _finish(self, i: int, j: int, tape: Tape) -> None:
        self.compute.writes(tape.buffer)  # freed
        self._has_computed()
        edges = self.edges
        edges.inputs[j].free(tape.slot)
        if edges.gradients:
            edges.gradients[j].free(tape.arrived)
            return
        targets = self._targets[i]
        targets.left -= 1
        if not targets.left:
            del self._targets[i]
            edges.targets[j].free(tape.arrived)

    def _differentiate(
        self, i: int, j: int, tape: Tape, halves: bool = False
    ) -> Callable[[], None] | None:
        """Issue the backward; with ``halves``, only the inputs' half, and return the other half."""
        self._free_gradients()
        outgoing = self._untracked or Buffer("gradients of the input")
        reads = (self.working, tape.buffer, tape.slot.buffer, tape.arrived.buffer)
        # torch.utils.checkpoint runs blocks again, and exchanges the random numbers there.
        writes = (self.weight_gradients, self.module_buffers, outgoing)
        with self.computing(reads, writes), RNG_LOCK:  # a hook may draw random numbers
            if self.edges.gradients:
                pairs, count = seeded(tape.output, tape.arrived.message.tensors)
            else:
                loss = tape.output
                assert isinstance(loss, Tensor)
                seed = torch.full_like(loss, self.weight(tape, i, j))
                pairs, count = [(loss, seed)] if loss.requires_grad else [], tape.count
            if count is not None:
                count = count.clone()  # the original lies in a receive buffer
                self.counts[i] = self.counts[i] + count if i in self.counts else count
            rest = None
            if halves:
                from .halves import differentiate_inputs

                rest = differentiate_inputs(pairs, tape.leaves)
            else:
                differentiate(pairs)
        self._outgoing = tape.leaves, outgoing, count
        return rest

    def send_gradient(self, i: int, j: int) -> None:
        assert self._outgoing is not None
        leaves, buffer, count = self._outgoing
        self._outgoing = None
        gradients = tuple([None if leaf is None else leaf.grad for leaf in leaves])
        if count is not None:
            gradients = (*gradients, count)
        message, header = Message(gradients), NO_HEADER
        if self._sends_gradient:
            message = self._as_sent(self._sends_gradient, i, j, message, buffer)
        for number in self._number_back:
            header = Header(1, number(i, j))
        self._count_bytes(message, True)
        to = self.edges.to_previous[j]
        read = to.send(message, buffer, self.computed, header=header)
        if not self.immediate:
            self._in_transit.hold(read, buffer, message)

    def input_gradients(self) -> tuple[list[Tensor], Buffer]:
        """Return what the next send gives back, and the buffer that stands for its memory."""
        assert self._outgoing is not None
        leaves, buffer, _ = self._outgoing
        found = [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]
        return found, buffer

    # In an evaluation: the notice that a batch is finished, which is an empty message.

    def receive_word(self, i: int, j: int) -> None:
        edge = self.edges.gradients[j]
        edge.free(received(edge, "the next stage has ended its run, and its word"))

    def send_word(self, i: int, j: int) -> None:
        self.edges.to_previous[j].send(Message(()), Buffer("nothing"), self.computed)


def _both(first: Handler, second: Handler) -> Handler:
    def run(i: int, j: int) -> None:
        first(i, j)
        second(i, j)

    return run


def _versions(message: Message) -> list[int]:
    return [0 if tensor is None else tensor._version for tensor in message.tensors]
