"""Ends of a tie: what the stage that owns parameters and one that has copies do for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spectrain_ext.method import Method, phases_of, rules_at
from spectrain_ext.schedule import Kind, Place, find_generator
from spectrain_ext.schedule.reading import Entries
from spectrain_ext.transport import Buffer, Edge, Message, Receiver, Sender, Slot, Transit

from .cursor import Extent
from .names import found_as
from .stage import Handler, Stage
from .ties import Copy, Tie, ties_of


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
        self._rules = rules_at(method, places[self._home])
        self._place = places[0 if self._rules.forward_reads == "entry" else self._home]
        self._generate = find_generator(method.schedule)

    def begin(self) -> None:
        self._entries = Entries(self._generate(self._place))
        self._last: tuple[int, int] | None = None

    def reads_others(self, i: int, j: int) -> bool:
        """Whether the forward of a microbatch does; they are asked for in order."""
        version, horizon = self._entries.take(i, j), 0
        if self._rules.once:
            version = i
        elif self._rules.forward_reads == "previous":
            version = max(0, i - 1)
        elif self._rules.forward_horizon == "counted":
            horizon = i - version
        last, self._last = self._last, (version, horizon)
        return last != self._last


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


class End:
    """One end of a tie: what its stage does beside its own actions."""

    def begin(self, extent: Extent) -> None:
        """A run begins; ValueError if a gradient hook would see a part of a gradient."""

    def before_forward(self, i: int, j: int) -> None: ...

    def after_forward(self, i: int, j: int) -> None: ...

    def before_backward(self, i: int, j: int) -> None: ...

    def after_backward(self, i: int, j: int, ends: bool) -> None:
        """``ends``: False after its first half."""

    def ready(self, i: int) -> bool:
        """Whether the update has nothing to wait for: a copy may put off its weights' gradients."""
        return True

    def before_update(self, i: int) -> None:
        """May be called again before the update."""

    def end(self) -> None:
        """The run has ended, or failed; may be repeated."""


class Home(End):
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
        self._weights, self._gradients, self._turns = weights, gradients, turns
        self._names = [name for name, _ in tie.names]
        self._added: int | None = None

    def begin(self, extent: Extent) -> None:
        _refuse_hooks(self.stage, zip(self._names, self.params, strict=True))
        self._turns.begin()
        self._added = None

    def before_forward(self, i: int, j: int) -> None:
        if self._turns.reads_others(i, j):
            self._send([p.detach() for p in self.params], self.stage.working)

    def _send(self, tensors: Sequence[Tensor], source: Buffer) -> None:
        """Nothing writes weights before they have been read."""
        stage = self.stage
        read = self._weights.send(Message(tuple(tensors), False), source, stage.loaded)
        stage.predict.wait(read)
        stage.predict.record(stage.loaded)

    def send_true(self) -> None:
        """After the last update, or outside of a run: send the true weights."""
        stage = self.stage
        true = {} if stage.weights is None else stage.weights.true_weights()
        sent = Buffer(f"true weights of stage {stage.index} that others have as well")
        stage.predict.wait(stage.computed)
        with stage.predict.using(reads=stage.memory, writes=(sent,)):
            tensors = [true.get(p, p).detach().to(p.dtype) for p in self.params]
        stage.predict.record(stage.loaded)
        self._send(tensors, sent)

    def ready(self, i: int) -> bool:
        return self._gradients is None or self._added == i or self._gradients.has()

    def before_update(self, i: int) -> None:
        """Add the copies' gradient of the minibatch to this stage's own."""
        if self._gradients is None or self._added == i:
            return
        stage, slot = self.stage, self._gradients.receive()
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
        self._gradients.free(slot)
        self._added = i


class Away(End):
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
        keeps: whether to end with what arrived last, as nobody else sees to it.
    """

    def __init__(
        self,
        stage: Stage,
        tie: Tie,
        copies: Sequence[Copy],
        weights: Receiver,
        gradients: Sender | None,
        turns: Turns,
        keeps: bool,
    ) -> None:
        known = {each.names[0]: each for each in copies if each.stage == stage.index}
        self.stage, self.copies = stage, [known[name] for _, name in tie.names]
        self._trained = [c for c, learns in zip(self.copies, tie.trained, strict=True) if learns]
        self.memory = Buffer(f"copies of others' weights in stage {stage.index}")
        stage.share(self.memory)
        self._weights, self._gradients, self._turns = weights, gradients, turns
        self._keeps = keeps
        self._extent: Extent
        self._own: list[Tensor] = []  # memory between runs
        self._forget()

    def _forget(self) -> None:
        self._now: Slot | None = None  # for the forwards to come
        self._uses: dict[Slot, int] = {}  # backwards that will need it
        self._of: dict[tuple[int, int], Slot] = {}
        self._in_transit = Transit(self.stage.compute, 1)

    def begin(self, extent: Extent) -> None:
        """Start a run.

        Raises:
            RuntimeError: the stage has other parameters now.
            ValueError: one has a gradient hook.
        """
        _refuse_hooks(self.stage, ((each.names[0], each.held) for each in self.copies))
        self._extent = extent
        self._turns.begin()
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

    def before_forward(self, i: int, j: int) -> None:
        if self._turns.reads_others(i, j):
            self._take()
        slot = self._now
        assert slot is not None
        self._of[i, j] = slot
        self._uses[slot] += 1
        self._compute_with(slot)

    def _take(self) -> None:
        before, self._now = self._now, self._weights.receive()
        self._uses[self._now] = 0
        if before is not None and not self._uses[before]:
            del self._uses[before]
            self._weights.free(before)

    def after_forward(self, i: int, j: int) -> None:
        self.stage.compute.reads(self._of[i, j].buffer)

    def before_backward(self, i: int, j: int) -> None:
        self._compute_with(self._of[i, j])

    def after_backward(self, i: int, j: int, ends: bool) -> None:
        stage, slot = self.stage, self._of[i, j]
        stage.compute.reads(slot.buffer)
        if not ends:
            return
        del self._of[i, j]
        self._uses[slot] -= 1
        if not self._uses[slot] and slot is not self._now:
            del self._uses[slot]
            self._weights.free(slot)
        if self._gradients is not None and j == len(self._extent.shares[i]) - 1:
            self._send_gradients(self._gradients)

    def _send_gradients(self, to: Sender) -> None:
        stage = self.stage
        gradients = (each.held.grad for each in self._trained)
        found = tuple(g.to_dense() if g is not None and g.is_sparse else g for g in gradients)
        self._drop_gradients()
        sent = Buffer(f"gradients of others' weights in stage {stage.index}")
        stage.compute.writes(sent)
        stage.compute.record(stage.computed)
        read = to.send(Message(found, False), sent, stage.computed)
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
        self._weights.free(slot)
        self._now = None

    def end(self) -> None:
        if self._keeps:
            self._end_with_last()
        elif self._now is not None:
            self._weights.free(self._now)
        for each, own in zip(self.copies, self._own, strict=False):
            each.held.data = own
        self._drop_gradients()
        self._in_transit.reset()
        self._forget()
        self._own = []


class LocalTies:
    """The ties between stages of one process.

    Args:
        copies: that stages have.
        stages: all of them.
        places: theirs, with the largest window that each will have.
        later: of each, by how many microbatches it puts backwards off (``put_off_by``).
        method: what they train by, with all of its phases.

    Attributes:
        edges: between the ends.
        ends: of every stage that has any.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        stages: Sequence[Stage],
        places: Sequence[Place],
        later: Sequence[int],
        method: Method,
    ) -> None:
        self.edges: list[Edge] = []
        self.ends: dict[int, list[End]] = {}
        self._pairs: list[tuple[Home, Away, Edge]] = []
        self._turns: list[Turns] = []

        def edge(a: Stage, b: Stage, what: str, depth: int) -> Edge:
            name = f"edge {a.index} -> {b.index} of tied {what}"
            self.edges.append(Edge(name, a.device, b.device, b.compute, depth))
            return self.edges[-1]

        counted = any(phase.forward_horizon == "counted" for phase in phases_of(method))
        for tie in ties_of(each.member for each in copies):
            a, b, place = stages[tie.home], stages[tie.copy], places[tie.home]
            depth = depth_of(place, later[tie.copy], counted)
            there = edge(a, b, "weights", depth)
            back = edge(b, a, "gradients", depth) if any(tie.trained) else None
            home, away = Turns(tie.home), Turns(tie.home)
            self._turns += home, away
            pair = (
                Home(a, tie, there, back, home),
                Away(b, tie, copies, there, back, away, keeps=False),
            )
            self._pairs.append((*pair, there))
            for end, stage in zip(pair, (a, b), strict=True):
                self.ends.setdefault(stage.index, []).append(end)

    def change(self, method: Method, places: Sequence[Place]) -> None:
        """Say what all stages train by, from the next run on, and where each is."""
        for turns in self._turns:
            turns.change(method, places)

    def begin(self, extent: Extent) -> None:
        for ends in self.ends.values():
            for end in ends:
                end.begin(extent)

    def end(self) -> None:
        """Give the copies the true weights, which the homes have again by now."""
        for ends in self.ends.values():
            for end in ends:
                end.end()
        for home, away, edge in self._pairs:
            a, b, copy_stream = home.stage, away.stage, edge.stream
            for event in (a.loaded, b.computed):
                copy_stream.wait(event)
            with copy_stream.using(reads=(a.working,), writes=(away.memory,)), torch.no_grad():
                for p, each in zip(home.params, away.copies, strict=True):
                    each.held.data.copy_(p.detach(), non_blocking=True)
            done = copy_stream.event()
            copy_stream.record(done)
            for stage in (a, b):
                stage.predict.wait(done)
                stage.predict.record(stage.loaded)
            for each in away.copies:
                each.followed()


def tied(handlers: dict[Kind, Handler], ends: Sequence[End]) -> dict[Kind, Handler]:
    """A stage's handlers, which see to the ends that it has as well."""
    if not ends:
        return handlers
    forward = handlers[Kind.FORWARD]

    def both_forward(i: int, j: int) -> None:
        for end in ends:
            end.before_forward(i, j)
        forward(i, j)
        for end in ends:
            end.after_forward(i, j)

    def both(kind: Kind) -> Handler:
        """With the ends' part of a backward, or of half of one."""
        backward = handlers[kind]

        def both_backward(i: int, j: int) -> None:
            for end in ends:
                end.before_backward(i, j)
            backward(i, j)
            for end in ends:
                end.after_backward(i, j, kind is not Kind.BACKWARD_INPUT)

        return both_backward

    backwards = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS)
    return {**handlers, Kind.FORWARD: both_forward, **{kind: both(kind) for kind in backwards}}
