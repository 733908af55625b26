"""Receives, computes and sends the microbatches of one stage in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, Never

import torch
from torch import Tensor

from spectrain_ext.rng import RNG_LOCK, StageRandom, States
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import (
    Buffer,
    Message,
    Receiver,
    Sender,
    Slot,
    Transit,
)
from spectrain_ext.weights.own_writes import OwnWrites
from spectrain_ext.weights.storage import SavedWeights

from .cursor import Cursor
from .module_state import ModuleBuffers, ModuleModes, changing_modes
from .passes import Handler, hooks
from .stage import NOTHING, Stage
from .tape import (
    NOTHING_SENT,
    Tape,
    activation,
    called,
    copied_out,
    differentiate,
    packed,
    run_on,
    seeded,
)
from .updates import Updates


class Mode(Enum):
    TRAIN = "train"
    EVALUATE = "evaluate"  # forwards only, modules in eval mode, with separate random numbers
    CALL = "call"  # forwards only, modules in the mode they are in


@dataclass(frozen=True)
class StageEdges:
    """The edges of one stage: for each kind, one per microbatch that this replica computes."""

    replica: int  # index of this replica, of ``count``
    count: int
    inputs: Sequence[Receiver]  # the previous stage's ``to_next``
    targets: Sequence[Receiver]  # on the last stage only
    gradients: Sequence[Receiver]  # the next stage's ``to_previous``
    to_next: Sequence[Sender]
    to_previous: Sequence[Sender]


def missing(message: str) -> Never:
    """Raise RuntimeError: the end of the run has come before a message."""
    raise RuntimeError(f"{message} is missing")


class Compute:
    """Receives, forwards, backwards and sends of one stage in one run.

    If the stage is recomputed, a forward keeps its inputs, the module's buffers and the state of
    the random numbers, but no graph. Before its backward the whole forward runs again, with the
    weights of the backward. Where these differ from the forward's weights, the whole gradient,
    activations included, is that of the backward's weights. The second forward reads and does not
    update the buffers, such as running statistics, that the first one found; the same holds for a
    loss that is a module.

    Attributes:
        tapes: the records of the microbatches in flight, by minibatch and microbatch.
        keeps_graph: whether forwards make the graphs that backwards use.
        numbers: a context in which forwards draw random numbers.
        follows: a context in which a graph finds the weights of its backward.
        calls, lost: the hooks of passes.
        ended_by: the edge that has delivered the end of the run.
    """

    def __init__(
        self,
        stage: Stage,
        cursor: Cursor,
        edges: StageEdges,
        mode: Mode,
        updates: Updates | None,  # None: an evaluation
    ) -> None:
        self._stage, self._cursor, self._edges, self._updates = stage, cursor, edges, updates
        self._mode, self._trains = mode, mode is Mode.TRAIN
        self.keeps_graph = self._trains and not stage.recomputes
        self.tapes: dict[tuple[int, int], Tape] = {}
        self.ended_by: Receiver | None = None
        self._received: Slot | None = None  # the inputs of the next forward
        # Inputs whose gradients go to the previous stage, the buffer that stands for their memory,
        # and the count that is sent with them.
        self._outgoing: tuple[Sequence[Tensor | None], Buffer, Tensor | None] | None = None
        self._in_transit = Transit(stage.compute)  # gradients that are being sent
        self._sent = Transit(stage.compute)  # activations being sent that no tape holds
        self._entered: Sequence[ModuleBuffers] = ()  # during a recomputation
        # Stands for the memory of all computations, on the CPU only.
        self._untracked = Buffer(f"memory of stage {stage.index}") if stage.immediate else None
        self.numbers: AbstractContextManager[object] = stage.random
        self.follows: AbstractContextManager[object] = NOTHING
        self._modes: ModuleModes | None = None
        self._own: OwnWrites | None = None  # by the module, in a training
        passes = stage.passes
        self._sends_activation = hooks(passes, "sends_activation")
        self._sends_gradient = hooks(passes, "sends_gradient")
        # The last one's message arrives outermost. The caller's batches come as they are.
        self._received_activation = hooks(passes, "received_activation")[::-1]
        if not edges.to_previous:
            self._received_activation = []
        self._received_gradient = hooks(passes, "received_gradient")[::-1]
        self.calls, self.lost = hooks(passes, "calls"), hooks(passes, "lost")
        if not self._trains:
            self.calls = []

    def begin(self) -> None:
        """Prepare forwards: their random numbers, module mode, and a search for saved weights."""
        stage = self._stage
        if self._trains:
            weights, saving = stage.weights, hooks(stage.passes, "saving")
            self._own = None if weights is None else weights.own_writes
            # Where the backward uses other weights, the forward's graph must find those.
            if weights is not None and (saving or weights.differs_in_backward):
                assert weights.storage is not None
                self.follows = SavedWeights(weights.storage)
            for save in saving:
                self.follows = save(self.follows)
        else:
            self.numbers = NOTHING
            if self._mode is Mode.EVALUATE:
                self.numbers = StageRandom(stage.index, stage.device)
                self._modes = ModuleModes(stage.module)
                with changing_modes(f"evaluate: stages[{stage.index}]"):
                    self._modes.evaluate()

    def handlers(self) -> dict[Kind, Handler]:
        edges = self._edges
        steps: dict[Kind, Handler] = {
            Kind.RECEIVE_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
        }
        if edges.to_next:
            steps[Kind.SEND_ACTIVATION] = self._send_activation
        if not self._trains:
            if edges.gradients:
                steps[Kind.RECEIVE_WORD] = self._receive_word
            if edges.to_previous:
                steps[Kind.SEND_WORD] = self._send_word
            return steps
        steps[Kind.BACKWARD] = self._backward
        steps[Kind.BACKWARD_INPUT] = self._backward_input
        steps[Kind.BACKWARD_WEIGHTS] = self._backward_weights
        if edges.gradients:
            steps[Kind.RECEIVE_GRADIENT] = self._receive_gradient
        if edges.to_previous:
            steps[Kind.SEND_GRADIENT] = self._send_gradient
        if self._stage.recomputes:
            steps[Kind.RECOMPUTE] = self._recompute
        return steps

    def end(self) -> None:
        """Put back what the run has changed; may be repeated."""
        if isinstance(self.numbers, StageRandom):
            self.numbers.leave()
        if self._modes is not None:
            self._modes.restore()
        for buffers in self._entered:
            buffers.__exit__()
        self._entered = ()
        self.follows, self._own = NOTHING, None  # they would keep all buffers
        self._in_transit.free()
        self._sent.free()

    # Forward.

    def _receive_activation(self, i: int, j: int) -> None:
        """Receive the next microbatch, or the end of the run, which goes on to the next stage."""
        edges = self._edges
        slot = edges.inputs[j].receive()
        if slot is None:
            self.ended_by = edges.inputs[j]
            self.pass_on_end()
            return
        header = slot.header
        if j == 0:
            self._cursor.add(len(range(edges.replica, header.parts, edges.count)))
        if self._received_activation:
            with self._stage.computing(reads=(slot.buffer,)):
                for unpack in self._received_activation:
                    slot.message = unpack(i, j, slot.message)
        self._cursor.shares[i][j] = header.share
        self._received = slot

    def pass_on_end(self) -> None:
        self._cursor.stop()
        for edge in dict.fromkeys(self._edges.to_next):
            edge.end()

    @property
    def samples(self) -> int:
        """The samples of the microbatch received last."""
        assert self._received is not None
        return self._received.header.samples

    def _forward(self, i: int, j: int) -> None:
        stage, slot, graph, own = self._stage, self._received, self.keeps_graph, self._own
        assert slot is not None
        message, buffer = slot.message, self._untracked or Buffer("activations")
        leaves: Sequence[Tensor | None] = ()
        states: States | None = None
        module_buffers: Sequence[ModuleBuffers] = ()
        # A first layer that works in place writes the slot.
        writes = (slot.buffer, stage.module_buffers, buffer)
        if not stage.immediate:
            self._free_sent()
        with (
            stage.computing(writes=writes, weights=True),
            # Most callers have autograd enabled; setting it again takes 0.8 us.
            NOTHING if torch.is_grad_enabled() == graph else torch.set_grad_enabled(graph),
            RNG_LOCK,
            self.numbers,
            self.follows,
        ):
            for call in self.calls:
                call(i, j, stage.module, message)
            if own is not None and own.copies:
                own.before()
            if graph:
                leaves, output = self._run(message)
            elif self._trains:
                states, module_buffers = stage.random.states(), (ModuleBuffers(stage.module),)
                # Copies, since the second forward needs the inputs as they were.
                copies = [None if t is None else t.clone() for t in message.tensors]
                output = called(stage.module, input=packed(message, copies))
            else:
                value = packed(message, message.tensors)
                output = copied_out(called(stage.module, input=value), message)
        if own is not None and own.after():
            stage.carry_own_writes(own)
        sent = NOTHING_SENT
        if self._edges.to_next:
            sent = activation(output)
            if not graph and self._trains:
                learns = stage.weights is not None or any(message.differentiable)
                sent = sent.with_gradient(learns)
        self.tapes[i, j] = Tape(slot, buffer, leaves, output, sent, states, module_buffers)
        if not stage.immediate:
            stage.note_use()
        if self._trains:
            if len(self.tapes) > stage.peak:
                stage.note_in_flight(len(self.tapes))
        else:
            self._edges.inputs[j].free(slot)

    def _run(self, message: Message) -> tuple[list[Tensor | None], Any]:
        # Autograd allows no in-place operation on a leaf. The identity between the leaf and the
        # module costs as much as a small layer, so it stays only if the first forward needed it,
        # and comes back if a later one does.
        stage = self._stage
        entry = stage.in_place is not False
        before = _versions(message) if entry else []
        try:
            ran = run_on(stage.module, message, entry)
        except RuntimeError as error:
            if entry or "leaf Variable that requires grad" not in str(error):
                raise
            stage.note_in_place(True)
            stage.random.rewind()
            return run_on(stage.module, message, entry=True)
        if entry:
            stage.note_in_place(bool(stage.in_place) or _versions(message) != before)
        return ran

    def _send_activation(self, i: int, j: int) -> None:
        tape, to = self.tapes[i, j], self._edges.to_next[j]
        message, buffer = tape.message, tape.buffer
        if self._sends_activation:
            buffer = Buffer("activations as passes send them")
            message = self._as_sent(self._sends_activation, i, j, message, buffer)
        ready = () if self._stage.immediate else (self._stage.compute.mark(),)
        read = to.send(message, buffer, *ready, header=tape.header)
        if self._sends_activation or not self.keeps_graph:
            self._sent.hold(read, buffer, message)
        if self.keeps_graph:
            return
        tape.forget_output()
        if not self._trains:
            del self.tapes[i, j]

    def _free_sent(self) -> None:
        """Free what was sent before the last messages, which a next stage may still copy."""
        self._in_transit.free(but=1)
        self._sent.free(but=1)

    def _as_sent(
        self, sends: Sequence[Any], i: int, j: int, message: Message, buffer: Buffer
    ) -> Message:
        """Return a message as passes send it; ``buffer`` stands for its memory."""
        with self._stage.computing(writes=(buffer,)):
            for send in sends:
                message = send(i, j, message)
        return message

    # Backward.

    def _receive_gradient(self, i: int, j: int) -> None:
        edge = self._edges.gradients[j]
        slot = edge.receive() or missing("the next stage has ended its run, and a gradient")
        if self._received_gradient:
            with self._stage.computing(reads=(slot.buffer,)):
                for unpack in self._received_gradient:
                    slot.message = unpack(i, j, slot.message)
        self.tapes[i, j].receive_gradients(slot)

    def _recompute(self, i: int, j: int) -> None:
        stage, tape, own = self._stage, self.tapes[i, j], self._own
        message = tape.slot.message
        writes = [tape.slot.buffer, tape.buffer, stage.module_buffers]
        if tape.loss is not None:
            writes.append(tape.loss.targets.slot.buffer)
        assert tape.states is not None
        with (
            stage.computing(writes=writes, weights=True),
            torch.enable_grad(),
            ExitStack() as held,
        ):
            if own is not None and own.copies:
                own.before()
            self._entered = tape.module_buffers
            for buffers in reversed(tape.module_buffers):  # the loss may contain the module
                held.enter_context(buffers)
            with stage.random.at(tape.states):
                leaves, output = self._run(message)
                if tape.loss is not None:
                    output = tape.loss.again(output)
        tape.record_again(leaves, output)
        self._entered = ()
        if own is not None and own.after():
            stage.carry_own_writes(own)

    def _backward(self, i: int, j: int) -> None:
        tape = self.tapes.pop((i, j))
        self._differentiate(i, j, tape)
        self._finish(i, j, tape)

    def _backward_input(self, i: int, j: int) -> None:
        """Compute the gradients of the input, and those that cannot wait."""
        tape = self.tapes[i, j]
        # A recomputed graph is differentiated as a whole: it should not live until the second half.
        tape.put_off(self._differentiate(i, j, tape, halves=not self._stage.recomputes))
        self._stage.note_use()

    def _backward_weights(self, i: int, j: int) -> None:
        stage, tape = self._stage, self.tapes.pop((i, j))
        if tape.rest is not None:
            writes = (stage.weight_gradients, stage.module_buffers)
            with stage.computing(reads=tape.memory, writes=writes, weights=True), RNG_LOCK:
                tape.rest()
        self._finish(i, j, tape)

    def _finish(self, i: int, j: int, tape: Tape) -> None:
        stage, edges = self._stage, self._edges
        if not stage.immediate:
            stage.compute.writes(tape.buffer)  # freed
            stage.note_use()
        edges.inputs[j].free(tape.slot)
        if tape.loss is not None:
            tape.loss.targets.note_used()
        elif tape.arrived is not None:
            edges.gradients[j].free(tape.arrived)

    def _differentiate(
        self, i: int, j: int, tape: Tape, halves: bool = False
    ) -> Callable[[], None] | None:
        """Issue the backward; with ``halves``, only the inputs' half, and return the other half."""
        stage, updates = self._stage, self._updates
        assert updates is not None
        if not stage.immediate:
            updates.free_gradients()
            self._free_sent()
        outgoing = self._untracked or Buffer("gradients of the input")
        # Checkpointed parts run again, and exchange the module buffers there.
        writes = (stage.weight_gradients, stage.module_buffers, outgoing)
        # Checkpointed parts write their own weights again.
        own = self._own if self._own is not None and self._own.known else None
        # A hook may draw random numbers.
        with stage.computing(reads=tape.memory, writes=writes, weights=True), RNG_LOCK:
            if own is not None and own.copies:
                own.before()
            if tape.loss is None:
                assert tape.arrived is not None
                pairs, count = seeded(tape.output, tape.arrived.message.tensors)
            else:
                loss: Tensor = tape.output
                seed = torch.full_like(loss, tape.loss.weight)
                pairs, count = [(loss, seed)] if loss.requires_grad else [], tape.loss.count
            if count is not None:
                count = count.clone()  # the original lies in a receive buffer
                divisors = updates.divisors
                divisors[i] = divisors[i] + count if i in divisors else count
            rest = None
            if halves:
                from .halves import differentiate_inputs

                rest = differentiate_inputs(pairs, tape.leaves)
            else:
                differentiate(pairs)
        if own is not None and own.after():
            stage.carry_own_writes(own)
        self._outgoing = tape.leaves, outgoing, count
        return rest

    def input_gradients(self) -> tuple[list[Tensor], Buffer]:
        """Return what the next send gives back, and the buffer that stands for its memory."""
        assert self._outgoing is not None
        leaves, buffer, _ = self._outgoing
        gradients = [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]
        return gradients, buffer

    def _send_gradient(self, i: int, j: int) -> None:
        assert self._outgoing is not None
        leaves, buffer, count = self._outgoing
        self._outgoing = None
        gradients = tuple([None if leaf is None else leaf.grad for leaf in leaves])
        if count is not None:
            gradients = (*gradients, count)
        message = Message(gradients)
        if self._sends_gradient:
            message = self._as_sent(self._sends_gradient, i, j, message, buffer)
        to = self._edges.to_previous[j]
        ready = () if self._stage.immediate else (self._stage.compute.mark(),)
        read = to.send(message, buffer, *ready)
        if not self._stage.immediate:
            self._in_transit.hold(read, buffer, message)

    # In an evaluation: the notice that a batch is finished, which is an empty message.

    def _receive_word(self, i: int, j: int) -> None:
        edge = self._edges.gradients[j]
        edge.free(edge.receive() or missing("the next stage has ended its run, and its word"))

    def _send_word(self, i: int, j: int) -> None:
        edge = self._edges.to_previous[j]
        edge.send(Message(()), Buffer("nothing"), self._stage.compute.mark())


def _versions(message: Message) -> list[int]:
    return [0 if tensor is None else tensor._version for tensor in message.tensors]
