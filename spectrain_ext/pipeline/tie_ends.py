"""Ends of a tie: what the stage that owns parameters and one that has copies do for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.method import Method, rules_at
from spectrain_ext.schedule import Entries, Instruction, Kind, Ledger, Place, find_generator
from spectrain_ext.transport import Buffer, Edge, Message, Receiver, Sender, Slot, Transit

from .loads import Handler
from .names import found_as
from .stage import Stage
from .ties import Copy, Tie


class Turns:
    """Tells which forwards of a stage read other weights than the forward before.

    The schedule says so. Both ends of a tie ask, with the same microbatches, and come to the same
    answers: that is how the copy's end knows what is sent without being told.

    Args:
        home: the stage.
    """

    def __init__(self, home: int) -> None:
        self._home = home

    def change(self, method: Method, places: Sequence[Place]) -> None:
        """Say what all stages train by, from the next run on, and where each is."""
        self._places = places[0], places[self._home]
        self._rules = rules_at(method, self._places[1])
        self._generate = find_generator(method.schedule)

    def begin(self) -> None:
        entry, place = self._places
        self._instructions = self._generate(place)
        self._ledger = Ledger(self._home, self._rules, entries=Entries(self._generate(entry)))
        self._last: tuple[int, int] | None = None

    def reads_others(self, i: int, j: int) -> bool:
        """Whether the forward of a microbatch does; they are asked for in order."""
        wanted = Instruction(Kind.FORWARD, i, j)
        for instruction in self._instructions:
            (reading,) = self._ledger.enter((instruction,))
            if instruction == wanted:
                break
        last, self._last = self._last, reading
        return last != reading


def depth_of(place: Place, put_off: int, counted: bool = True) -> int:
    """The versions of a home at this place that may be under way or in use at once, at most.

    What its microbatches in flight read, and what the copy's stage has from before. From one of
    these to the next the version may be another once for each update that comes between, and the
    horizon, where it is counted, once for each minibatch that begins. ``put_off`` is the copy's.
    """
    window = place.window + put_off - 1
    updates = -(-(window - 1) // place.microbatches)
    return min(window, 1 + updates * (1 + counted)) + 1


def _refuse_hooks(stage: Stage, named: Iterable[tuple[str, Tensor]]) -> None:
    for name, p in named:
        if p.requires_grad and (p._backward_hooks or p._post_accumulate_grad_hooks):
            raise ValueError(
                f"stages[{stage.index}]: parameter {name!r} is tied over stages and has a gradient "
                "hook, which would see this stage's part of the gradient only; remove it, and "
                "change the whole gradient in optimizers[k].register_step_pre_hook of the first "
                "stage that has the parameter"
            )


class Home:
    """The end that owns the parameters: sends what its forwards read, and adds up gradients.

    Args:
        stage: the stage.
        tie: what it has in common with the other end.
        weights: where their weights go.
        gradients: where gradients come from, if any do; received on the compute stream.
        turns: which forwards read other weights.
    """

    def __init__(
        self,
        stage: Stage,
        tie: Tie,
        weights: Sender,
        gradients: Receiver | None,
        turns: Turns,
    ) -> None:
        known = dict(stage.module.named_parameters(remove_duplicate=False))
        self.stage = stage
        self.params = [known[found_as(name, known)] for name, _ in tie.names]
        self._trained = [p for p, learns in zip(self.params, tie.trained, strict=True) if learns]
        self.weights, self.gradients, self.turns = weights, gradients, turns
        self._names = [name for name, _ in tie.names]

    def begin(self) -> None:
        """Start a run; ValueError if a gradient hook would see a part of a gradient."""
        _refuse_hooks(self.stage, zip(self._names, self.params, strict=True))
        self.turns.begin()

    def send_weights(self, i: int, j: int) -> None:
        """Before a forward: what it reads, if that is something else than before."""
        if self.turns.reads_others(i, j):
            self._send([p.detach() for p in self.params], self.stage.working)

    def _send(self, tensors: Sequence[Tensor], source: Buffer) -> None:
        """Nothing writes weights before they have been read."""
        stage = self.stage
        read = self.weights.send(Message(tuple(tensors), False), source, stage.loaded)
        stage.predict.wait(read)
        stage.predict.record(stage.loaded)

    def send_true(self) -> None:
        """After the last update, or outside of a run: send the true weights."""
        stage = self.stage
        weights = stage.weights
        true = weights.true_weights() if weights is not None and weights.bound else {}
        sent = Buffer(f"true weights of stage {stage.index} that others have as well")
        stage.predict.wait(stage.computed)
        with stage.predict.using(reads=stage.memory, writes=(sent,)):
            tensors = [true.get(p, p).detach().to(p.dtype) for p in self.params]
        stage.predict.record(stage.loaded)
        self._send(tensors, sent)

    def add_gradients(self, i: int, j: int) -> None:
        """Before an update: add the copies' gradient of the minibatch to this stage's own."""
        if self.gradients is None:
            return
        stage, slot = self.stage, self.gradients.receive()
        if slot is None:
            raise RuntimeError("gradients of tied weights are missing at the end of the run")
        assert slot.message is not None
        with stage.compute.using(reads=(slot.buffer,), writes=(stage.weight_gradients,)):
            for p, gradient in zip(self._trained, slot.message.tensors, strict=True):
                if gradient is None or not p.requires_grad:  # frozen since
                    continue
                if p.grad is None:
                    p.grad = gradient.clone()
                elif p.grad.is_sparse:  # an embedding's may be
                    p.grad = gradient + p.grad
                else:
                    p.grad.add_(gradient)
        stage.compute.record(stage.computed)
        self.gradients.free(slot)


class Away:
    """The end with the copies: computes with what the home sent, and sends gradients back.

    A forward and its backward compute with what the home's forward of the microbatch read. That is
    not copied again: the parameters' data is where it arrived.

    Args:
        stage: the stage.
        tie: what it has in common with the other end.
        copies: those that the stage has, of any home.
        weights: where their weights come from; received on the compute stream.
        gradients: where gradients go, if any do.
        turns: which forwards of the home read other weights.
        home: the other end, where that is in this process.
    """

    def __init__(
        self,
        stage: Stage,
        tie: Tie,
        copies: Sequence[Copy],
        weights: Receiver,
        gradients: Sender | None,
        turns: Turns,
        home: Home | None = None,
    ) -> None:
        known = {each.names[0]: each for each in copies if each.stage == stage.index}
        self.stage, self.copies = stage, [known[name] for _, name in tie.names]
        self._trained = [c for c, learns in zip(self.copies, tie.trained, strict=True) if learns]
        self.memory = Buffer(f"copies of others' weights in stage {stage.index}")
        stage.share(self.memory)
        self.weights, self.gradients, self.turns, self.home = weights, gradients, turns, home
        self._own: list[Tensor] = []  # memory between runs
        self._forget()

    def _forget(self) -> None:
        self._now: Slot | None = None  # for the forwards to come
        self._uses: dict[Slot, int] = {}  # backwards that will need it
        self._of: dict[tuple[int, int], Slot] = {}
        self._in_transit = Transit(self.stage.compute, 1)

    def begin(self) -> None:
        """Start a run.

        Raises:
            RuntimeError: the stage has other parameters now.
            ValueError: one has a gradient hook.
        """
        _refuse_hooks(self.stage, ((each.names[0], each.held) for each in self.copies))
        self.turns.begin()
        self._own = self._memory()
        self._forget()
        self._drop_gradients()

    def _memory(self) -> list[Tensor]:
        for each in self.copies:
            if not each.in_place() or each.held.device != self.stage.device:
                raise RuntimeError(
                    f"{each.where}, a copy of {each.home_name!r} of stages[{each.home}], is not "
                    "what the pipeline was made with, as by .to() or load_state_dict(assign=True); "
                    "change parameters in place, or call release() first and build a new Pipeline "
                    "afterwards"
                )
        return [each.held.data for each in self.copies]

    def follow(self) -> None:
        """Outside of a run: take what the home sends."""
        self._own = self._memory()
        self.take_true()
        self._own = []
        self._forget()

    def _drop_gradients(self) -> None:
        for each in self.copies:
            each.held.grad = None

    def _compute_with(self, slot: Slot) -> None:
        assert slot.message is not None
        self.stage.compute.reads(slot.buffer)
        for each, tensor in zip(self.copies, slot.message.tensors, strict=True):
            assert tensor is not None
            each.held.data = tensor

    def receive_weights(self, i: int, j: int) -> None:
        """Before a forward: what its home's forward has read."""
        if self.turns.reads_others(i, j):
            self._take()
        slot = self._now
        assert slot is not None
        self._of[i, j] = slot
        self._uses[slot] += 1
        self._compute_with(slot)

    def _take(self) -> None:
        before, self._now = self._now, self.weights.receive()
        if self._now is None:
            raise RuntimeError("tied weights are missing at the end of the run")
        self._uses[self._now] = 0
        if before is not None and not self._uses[before]:
            del self._uses[before]
            self.weights.free(before)

    def load_weights(self, i: int, j: int) -> None:
        """Before a backward, or half of one: what its forward had."""
        self._compute_with(self._of[i, j])

    def free_weights(self, i: int, j: int) -> None:
        """A backward has ended."""
        slot = self._of.pop((i, j))
        self.stage.compute.reads(slot.buffer)
        self._uses[slot] -= 1
        if not self._uses[slot] and slot is not self._now:
            del self._uses[slot]
            self.weights.free(slot)

    def send_gradients(self, i: int, j: int) -> None:
        """Before the update of the minibatch."""
        if self.gradients is None:
            return
        stage = self.stage
        gradients = (each.held.grad for each in self._trained)
        found = tuple(g.to_dense() if g is not None and g.is_sparse else g for g in gradients)
        self._drop_gradients()
        sent = Buffer(f"gradients of others' weights in stage {stage.index}")
        stage.compute.writes(sent)
        stage.compute.record(stage.computed)
        read = self.gradients.send(Message(found, False), sent, stage.computed)
        self._in_transit.hold(read, sent, found)

    def take_true(self) -> None:
        """After the last microbatch: take the true weights, which nothing computes with."""
        self._take()
        self._end_with_last()

    def _end_with_last(self) -> None:
        stage, slot = self.stage, self._now
        if slot is None:
            return
        message = slot.message
        assert message is not None
        with stage.compute.using(reads=(slot.buffer,), writes=(self.memory,)):
            for own, tensor in zip(self._own, message.tensors, strict=True):
                assert tensor is not None
                own.copy_(tensor)
        stage.compute.record(stage.computed)
        self.weights.free(slot)
        self._now = None

    def end(self) -> None:
        """The run has ended, or failed; may be repeated."""
        if self.home is None:  # what arrived last: nobody here has more
            self._end_with_last()
        elif self._now is not None:
            self.weights.free(self._now)
        for each, own in zip(self.copies, self._own, strict=False):
            each.held.data = own
        self._drop_gradients()
        self._in_transit.reset()
        self._forget()
        self._own = []
        if self.home is not None:
            self._copy_from(self.home)

    def _copy_from(self, home: Home) -> None:
        """Take the true weights, which the home has again by now."""
        a, b, copy_stream = home.stage, self.stage, self.weights.stream
        for event in (a.loaded, b.computed):
            copy_stream.wait(event)
        with copy_stream.using(reads=(a.working,), writes=(self.memory,)), torch.no_grad():
            for p, each in zip(home.params, self.copies, strict=True):
                each.held.data.copy_(p.detach(), non_blocking=True)
        done = copy_stream.event()
        copy_stream.record(done)
        for stage in (a, b):
            stage.predict.wait(done)
            stage.predict.record(stage.loaded)
        for each in self.copies:
            each.followed()


class Ties:
    """The ends of ties that the stages of this process have.

    Args:
        ties: of all stages.
        copies: that stages of this process have.
        stages: those, by index.
        depth: of a tie, the versions that may be under way or in use at once.
        remote: the edges of the n-th tie to a stage of another process, for weights and, if there
            are any, for gradients.

    Attributes:
        edges: between two stages of this process.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        copies: Sequence[Copy],
        stages: Mapping[int, Stage],
        depth: Callable[[Tie], int],
        remote: Callable[[int], tuple[Any, Any]],
    ) -> None:
        self.edges: list[Edge] = []
        self._homes: dict[int, list[Home]] = {}
        self._away: dict[int, list[Away]] = {}
        for n, tie in enumerate(ties):
            a, b = stages.get(tie.home), stages.get(tie.copy)
            if a is not None and b is not None:
                weights = self._edge(a, b, "weights", depth(tie))
                gradients = None
                if any(tie.trained):
                    gradients = self._edge(b, a, "gradients", depth(tie))
            elif a is not None or b is not None:
                weights, gradients = remote(n)
            home = None
            if a is not None:
                home = Home(a, tie, weights, gradients, Turns(tie.home))
                self._homes.setdefault(tie.home, []).append(home)
            if b is not None:
                away = Away(b, tie, copies, weights, gradients, Turns(tie.home), home)
                self._away.setdefault(tie.copy, []).append(away)

    def _edge(self, a: Stage, b: Stage, what: str, depth: int) -> Edge:
        name = f"edge {a.index} -> {b.index} of tied {what}"
        self.edges.append(Edge(name, a.device, b.device, b.compute, depth))
        return self.edges[-1]

    def _all(self) -> Iterator[Home | Away]:
        for homes in self._homes.values():
            yield from homes
        for away in self._away.values():
            yield from away

    def lends(self, stage: int) -> bool:
        """Whether other stages have copies of a stage's weights."""
        return stage in self._homes

    def borrows(self, stage: int) -> bool:
        """Whether a stage has copies of others' weights."""
        return stage in self._away

    def handlers(self, stage: int) -> dict[Kind, Handler]:
        """What runs a stage's instructions of ties."""
        homes, away = self._homes.get(stage, ()), self._away.get(stage, ())
        return {
            Kind.SEND_TIED_WEIGHTS: _each([end.send_weights for end in homes]),
            Kind.RECEIVE_TIED_WEIGHTS: _each([end.receive_weights for end in away]),
            Kind.LOAD_TIED_WEIGHTS: _each([end.load_weights for end in away]),
            Kind.FREE_TIED_WEIGHTS: _each([end.free_weights for end in away]),
            Kind.SEND_TIED_GRADIENTS: _each([end.send_gradients for end in away]),
            Kind.ADD_TIED_GRADIENTS: _each([end.add_gradients for end in homes]),
        }

    def gradients_are_there(self, stage: int) -> bool:
        """Whether a stage's update has all gradients: a copy may put off those of its weights."""
        edges = [home.gradients for home in self._homes.get(stage, ())]
        return all(edge is None or edge.blocks or edge.has() for edge in edges)

    # A run.

    def change(self, method: Method, places: Sequence[Place]) -> None:
        """Say what all stages train by, from the next run on, and where each is."""
        for end in self._all():
            end.turns.change(method, places)

    def begin(self) -> None:
        for end in self._all():
            end.begin()

    def follow(self) -> None:
        """Outside of a run: copies get what their homes in other processes have now."""
        self._send_true()
        for end in self._borrowed():
            end.follow()

    def close(self) -> None:
        """The stages have finished: copies in other processes get the true weights."""
        for end in self._borrowed():
            if end.gradients is not None:
                end.gradients.end()
        self._send_true()
        for end in self._borrowed():
            end.take_true()

    def _borrowed(self) -> list[Away]:
        """The copies whose homes are in other processes."""
        return [end for ends in self._away.values() for end in ends if end.home is None]

    def _send_true(self) -> None:
        for ends in self._homes.values():
            for end in ends:
                if end.weights not in self.edges:
                    end.send_true()
                    end.weights.end()

    def end(self) -> None:
        """Forget the run; may be repeated."""
        for end in (end for ends in self._away.values() for end in ends):
            end.end()


def _each(handlers: Sequence[Handler]) -> Handler:
    if len(handlers) == 1:
        return handlers[0]

    def run_all(i: int, j: int) -> None:
        for handler in handlers:
            handler(i, j)

    return run_all
