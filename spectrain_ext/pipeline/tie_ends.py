"""Sends tied weights from the stage that owns them to stages with copies, and gradients back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor

from spectrain_ext.method import Method, rules_at
from spectrain_ext.schedule import Entries, Instruction, Kind, Ledger, Place, find_generator
from spectrain_ext.transport import Buffer, Message, Receiver, Sender, Slot, Transit

from .names import found_as
from .passes import Handler
from .processes import Traffic
from .stage import Stage
from .ties import Copy, TiedStages


class _Readings:
    """Tells both ends of a tie, from the schedule, which forwards read other weights."""

    def __init__(self, method: Method, entry: Place, place: Place) -> None:
        generate = find_generator(method.schedule)
        entries = Entries(generate(entry))
        self._instructions = generate(place)
        self._ledger = Ledger(place.stage, rules_at(method, place), entries=entries)
        self._last: tuple[int, int] | None = None

    def differ(self, i: int, j: int) -> bool:
        """Whether the forward of a microbatch reads other weights; call it in order."""
        wanted = Instruction(Kind.FORWARD, i, j)
        for instruction in self._instructions:
            reading = self._ledger.enter(instruction)
            if instruction == wanted:
                break
        last, self._last = self._last, reading
        return last != reading


def depth_of(place: Place, put_off: int, counts_horizon: bool) -> int:
    """Return how many versions of a tied parameter may be under way or in use at once, at most.

    These are the versions that the microbatches in flight read, and the one that the stage with the
    copies has from before. From one microbatch to the next, the version may change once for each
    update in between, and the horizon, if it is counted, once for each minibatch that begins.
    ``place`` is the owner's, ``put_off`` the copy's.
    """
    window = place.window + put_off - 1
    updates = -(-(window - 1) // place.microbatches)
    return min(window, 1 + updates * (1 + counts_horizon)) + 1


def _refuse_hooks(stage: Stage, named: Iterable[tuple[str, Tensor]]) -> None:
    for name, p in named:
        if p.requires_grad and (p._backward_hooks or p._post_accumulate_grad_hooks):
            raise ValueError(
                f"stages[{stage.index}]: parameter {name!r} is tied over stages and has a gradient "
                "hook, which would see this stage's part of the gradient only; remove it, and "
                "change the whole gradient in optimizers[k].register_step_pre_hook of the first "
                "stage that has the parameter"
            )


class Lender:
    """The end that owns the parameters: sends what its forwards read, and adds up gradients."""

    def __init__(
        self,
        stage: Stage,
        copy: Stage | None,
        tie: TiedStages,
        weights: Sender,
        gradients: Receiver | None,
    ) -> None:
        known = dict(stage.module.named_parameters(remove_duplicate=False))
        self._names = [m.home_name for m in tie.members]  # one may have several copies
        self._params = [known[found_as(name, known)] for name in self._names]
        self._trained = [p for p, m in zip(self._params, tie.members, strict=True) if m.trained]
        self.stage, self.tie, self.weights, self.gradients = stage, tie, weights, gradients
        self.copy = copy  # None: it is in another process
        stage.note_lending()

    @property
    def arrived(self) -> Sized | None:
        """The gradients to add, see ``Receiver``."""
        return None if self.gradients is None else self.gradients.arrived

    def handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.SEND_TIED_WEIGHTS: self.send_weights,
            Kind.ADD_TIED_GRADIENTS: self.add_gradients,
        }

    def begin(self, method: Method, places: Sequence[Place]) -> None:
        _refuse_hooks(self.stage, zip(self._names, self._params, strict=True))
        self._readings = _Readings(method, places[0], places[self.tie.home])

    def send_weights(self, i: int, j: int) -> None:
        """Send the weights that the next forward reads, unless they are the same as before."""
        if self._readings.differ(i, j):
            self._send([p.detach() for p in self._params], self.stage.working)

    def _send(self, tensors: Sequence[Tensor], source: Buffer) -> None:
        stage = self.stage
        read = self.weights.send(Message(tuple(tensors)), source, stage.predict.mark())
        stage.predict.wait(read)  # before anything writes them

    def send_true(self) -> None:
        """Send the true weights, after the last update or outside of a run."""
        stage, weights = self.stage, self.stage.weights
        true = weights.true_weights() if weights is not None and weights.bound else {}
        sent = Buffer(f"true weights of stage {stage.index} that others have as well")
        stage.predict.wait_stream(stage.compute)
        if true and weights is not None and weights.updater.has_modes:
            with stage.predict.using(writes=stage.memory):
                weights.updater.set_mode("eval")  # as the end of the run will do
        with stage.predict.using(reads=stage.memory, writes=(sent,)):
            tensors = [true.get(p, p).detach().to(p.dtype) for p in self._params]
        self._send(tensors, sent)
        self.weights.end()

    def add_gradients(self, i: int, j: int) -> None:
        """Add the copies' gradient of the minibatch to this stage's own, before the update."""
        if self.gradients is None:
            return
        stage, slot = self.stage, self.gradients.receive()
        if slot is None:
            raise RuntimeError("gradients of tied weights are missing at the end of the run")
        with stage.compute.using(reads=(slot.buffer,), writes=(stage.weight_gradients,)):
            for p, gradient in zip(self._trained, slot.message.tensors, strict=True):
                if gradient is None:
                    continue
                if p.grad is None:
                    p.grad = gradient.clone()
                elif p.grad.is_sparse:  # as an embedding's may be
                    p.grad = gradient + p.grad
                else:
                    p.grad.add_(gradient)
        self.gradients.free(slot)

    def end(self) -> None:
        """End a run: nothing is half done at this end."""


class Borrower:
    """The end with the copies: computes with what the owner sent, and sends gradients back."""

    arrived = None  # its steps wait for nothing, or block

    def __init__(
        self,
        stage: Stage,
        home: Stage | None,
        tie: TiedStages,
        copies: Sequence[Copy],
        weights: Receiver,
        gradients: Sender | None,
    ) -> None:
        known = {each.names[0]: each for each in copies if each.stage == stage.index}
        self._copies = [known[m.name] for m in tie.members]
        self._trained = [known[m.name] for m in tie.members if m.trained]
        self.stage, self.tie, self.weights, self.gradients = stage, tie, weights, gradients
        self.home = home  # None: the owner is in another process
        self._memory = Buffer(f"copies of others' weights in stage {stage.index}")
        stage.share(self._memory)
        self._gradients_sent = Transit(stage.compute)
        self._forget()

    def handlers(self) -> dict[Kind, Handler]:
        return {
            Kind.RECEIVE_TIED_WEIGHTS: self.receive_weights,
            Kind.LOAD_TIED_WEIGHTS: self.load_weights,
            Kind.FREE_TIED_WEIGHTS: self.free_weights,
            Kind.SEND_TIED_GRADIENTS: self.send_gradients,
        }

    def _forget(self) -> None:
        self._own: list[Tensor] = []  # the memory of the copies between runs
        self._now: Slot | None = None  # for the next forwards
        self._of: dict[tuple[int, int], Slot] = {}  # by microbatch, for its backward
        self._gradients_sent.free()
        for each in self._copies:
            each.held.grad = None

    def begin(self, method: Method, places: Sequence[Place]) -> None:
        _refuse_hooks(self.stage, ((each.names[0], each.held) for each in self._copies))
        own = self._checked_memory()
        self._forget()
        self._own, self._readings = own, _Readings(method, places[0], places[self.tie.home])

    def _checked_memory(self) -> list[Tensor]:
        now = dict(self.stage.module.named_parameters(remove_duplicate=False))
        for each in self._copies:
            there = all(now.get(name) is each.held for name in each.names)
            if not there or each.held.device != self.stage.device:
                raise RuntimeError(
                    f"stages[{each.stage}]: parameter {each.names[0]!r}, a copy of "
                    f"{each.home_name!r} of stages[{each.home}], is not what the pipeline was made "
                    "with, as by .to() or load_state_dict(assign=True); change parameters in "
                    "place, or call release() first and build a new Pipeline afterwards"
                )
        return [each.held.data for each in self._copies]

    def receive_weights(self, i: int, j: int) -> None:
        """Point the copies at the weights that the owner's forward has read, before a forward."""
        if self._readings.differ(i, j):
            self._receive()
        assert self._now is not None
        self._of[i, j] = self._now
        self._compute_with(self._now)

    def _receive(self) -> None:
        before, self._now = self._now, self.weights.receive()
        if self._now is None:
            raise RuntimeError("tied weights are missing at the end of the run")
        self._free_unless_used(before)

    def _free_unless_used(self, slot: Slot | None) -> None:
        if slot is not None and slot is not self._now and slot not in self._of.values():
            self.weights.free(slot)

    def _compute_with(self, slot: Slot) -> None:
        self.stage.compute.reads(slot.buffer)
        for each, tensor in zip(self._copies, slot.message.tensors, strict=True):
            assert tensor is not None
            each.held.data = tensor  # without a copy

    def load_weights(self, i: int, j: int) -> None:
        """Point the copies at their forward's weights, before a backward or half of one."""
        self._compute_with(self._of[i, j])

    def free_weights(self, i: int, j: int) -> None:
        slot = self._of.pop((i, j))
        self.stage.compute.reads(slot.buffer)
        self._free_unless_used(slot)

    def send_gradients(self, i: int, j: int) -> None:
        """Send the gradient of the minibatch to the owner, before the update."""
        if self.gradients is None:
            return
        stage = self.stage
        gradients = (each.held.grad for each in self._trained)
        sent = Buffer(f"gradients of others' weights in stage {stage.index}")
        with stage.computing(writes=(sent,)):
            found = tuple(g.to_dense() if g is not None and g.is_sparse else g for g in gradients)
        for each in self._copies:
            each.held.grad = None
        read = self.gradients.send(Message(found), sent, stage.compute.mark())
        self._gradients_sent.free()
        self._gradients_sent.hold(read, sent, found)

    def take_true(self) -> None:
        """Receive the true weights, after the last microbatch or outside of a run."""
        self._own = self._own or self._checked_memory()
        self._receive()
        self._copy_last()

    def _copy_last(self) -> None:
        stage, slot = self.stage, self._now
        if slot is None:
            return
        with stage.compute.using(reads=(slot.buffer,), writes=(self._memory,)):
            for own, tensor in zip(self._own, slot.message.tensors, strict=True):
                assert tensor is not None
                own.copy_(tensor)
        self.weights.free(slot)
        self._now = None

    def end(self) -> None:
        """End a run, also after a failure; may be repeated."""
        home = self.home
        if home is None:  # then what arrived last is the newest here
            self._copy_last()
        elif self._now is not None:
            self.weights.free(self._now)
        for each, own in zip(self._copies, self._own, strict=False):
            each.held.data = own
        self._forget()
        if home is not None:  # which has the true weights again
            home.predict.wait_stream(self.stage.compute)
            with home.predict.using(reads=(home.working,), writes=(self._memory,)):
                for each in self._copies:
                    each.follow(changed=True)
            self.stage.predict.wait_stream(home.predict)


def ends_of(
    ties: Sequence[TiedStages],  # of all stages
    copies: Sequence[Copy],
    stages: Mapping[int, Stage],  # of this process
    edge_of: Callable[[Traffic, int, TiedStages], Any],  # of the n-th tie: its end, or the edge
    evaluates: bool,
) -> list[Lender | Borrower]:
    """Return the ends of ties that are in this process."""
    ends: list[Lender | Borrower] = []
    for n, tie in enumerate(ties):
        home, copy = stages.get(tie.home), stages.get(tie.copy)
        if evaluates and home is not None and copy is not None:
            continue  # between runs a copy in the same process has the true weights
        weights = edge_of(Traffic.TIED_WEIGHTS, n, tie)
        gradients = edge_of(Traffic.TIED_GRADIENTS, n, tie) if tie.trained else None
        if home is not None:
            ends.append(Lender(home, copy, tie, weights, gradients))
        if copy is not None:
            ends.append(Borrower(copy, home, tie, copies, weights, gradients))
    return ends


def bring_true(ends: Sequence[Lender | Borrower]) -> None:
    """Send the true weights to other processes: after the last instruction, or between runs."""
    borrowers = [end for end in ends if isinstance(end, Borrower) and end.home is None]
    for borrower in borrowers:
        if borrower.gradients is not None:
            borrower.gradients.end()
    for end in ends:
        if isinstance(end, Lender) and end.copy is None:
            end.send_true()
    for borrower in borrowers:
        borrower.take_true()
