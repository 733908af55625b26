"""Executor: runs the actions of all stages of one process, in one thread, as their inputs arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Value, split
from .errors import StageError
from .method import Method
from .rng import StageRandom
from .schedule import Action, Cursor, Extent, Kind, one_f_one_b
from .transport import Buffer, Edge, Message, Stream, Transit, callers_stream, new_stream
from .weights import Content, StageWeights


@dataclass(frozen=True, slots=True)
class Result:
    """One minibatch of a run.

    Attributes:
        index: its number within the run, counted from 0.
        loss: the loss of its forward, a detached 0-d tensor on the last stage's device. On CUDA the caller's current
            stream is ordered after its computation; the host has not waited for it.
    """

    index: int
    loss: Tensor


class _Entry(torch.autograd.Function):
    """Identity at a stage's input: a first layer may work in place on its output, not on an autograd leaf."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _Tape:
    """What a stage keeps of a microbatch from its forward to the end of its backward."""

    __slots__ = ("buffer", "leaves", "message", "output")

    def __init__(self, name: str) -> None:
        self.buffer = Buffer(name)  # stands for the memory of all of this
        self.leaves: list[Tensor | None] = []  # per input, None where no gradient is wanted
        self.output: Value  # where the backward starts; on the last stage the loss, once it is there
        self.message: Message  # the output without its graph


class Stage:
    """A stage's module with all that it needs to run: weights, random numbers, streams, edges, tapes."""

    def __init__(
        self, index: int, module: nn.Module, device: torch.device, weights: StageWeights | None
    ) -> None:
        self.index = index
        self.module = module
        self.device = device
        self.weights = weights
        self.random = StageRandom(index, device)
        self.compute = new_stream(device)
        self.predict = new_stream(device)  # whatever writes weights: loads and updates
        self.computed = self.compute.event()
        self.loaded = self.predict.event()
        self.working = Buffer(f"working weights of stage {index}")
        self.gradients = Buffer(f"weight gradients of stage {index}")
        self.input_gradients = Transit(self.compute, 1)
        self.tapes: dict[tuple[int, int], _Tape] = {}
        self.ahead: Edge  # what comes in for the forward: the batch's input, or the previous stage's output
        self.back: Edge | None = None  # what comes in for the backward: the next stage's gradient
        self.received: tuple[Message, Buffer]
        self.outgoing: tuple[Tensor | None, ...] = ()  # gradients of the input, to be sent
        self.cursor: Cursor


class Executor:
    """The stages of a pipeline, the edges between them, and the loop that drives them.

    Args:
        modules: the stages.
        devices: their devices.
        weights: their weights, None for a stage without trainable parameters.
        loss_fn: ``(output, target) -> 0-d tensor``.
        method: gives every stage its window.
        microbatches: parts per minibatch.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        devices: list[torch.device],
        weights: list[StageWeights | None],
        loss_fn: Callable[..., Tensor],
        method: Method,
        microbatches: int,
    ) -> None:
        n = len(modules)
        self.running = False
        self._loss_fn = loss_fn
        self._microbatches = microbatches
        self._windows = [method.window(k, n) for k in range(n)]
        self.stages = [Stage(k, modules[k], devices[k], weights[k]) for k in range(n)]
        for stage, previous in zip(self.stages, [None, *self.stages], strict=False):
            k = stage.index
            depth = self._windows[max(k - 1, 0)]
            source = None if previous is None else previous.device
            name = "batch -> stage 0" if previous is None else f"edge {k - 1} -> {k}"
            stage.ahead = Edge(name, source, stage.device, stage.compute, depth, microbatches)
            if previous is not None:
                name, depth = f"edge {k} -> {k - 1}", self._windows[k - 1]
                previous.back = Edge(
                    name, stage.device, previous.device, previous.compute, depth, microbatches
                )
        self._last = self.stages[-1]
        self._targets = Edge(
            "batch -> loss", None, self._last.device, self._last.compute, self._windows[0], microbatches
        )
        self._losses = Transit(self._last.compute, n)
        self._batch = Buffer("the caller's batch")
        self._results: deque[Result] = deque()
        self._run: dict[Kind, Callable[[Stage, Action], None]] = {
            Kind.PULL: self._pull,
            Kind.LOAD_FORWARD: self._load_forward,
            Kind.RECEIVE_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.LOSS: self._loss,
            Kind.LOAD_BACKWARD: self._load_backward,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.UPDATE: self._update,
        }

    # A run.

    def run(self, batches: Iterator[object]) -> Iterator[Result]:
        """Train on every batch; yields the results in order, each as soon as its loss has been issued.

        Closing the generator finishes the minibatches in flight and takes no further batch.
        """
        self._begin(batches)
        try:
            try:
                yield from self._steps()
            except GeneratorExit:
                self._extent.minibatches = self._pulled
                for _ in self._steps():
                    pass
        except BaseException:
            self._drop_everything()
            raise
        finally:
            self._end()

    def _begin(self, batches: Iterator[object]) -> None:
        for stage in self.stages:
            if stage.weights is not None:
                stage.weights.check(stage.index)
        self.running = True
        self._batches = batches
        self._pulled = 0
        self._extent = Extent()
        self._shares: dict[int, list[float]] = {}
        n = len(self.stages)
        for stage in self.stages:
            k = stage.index
            actions = one_f_one_b(k, n, self._windows[k], self._microbatches)
            stage.cursor = Cursor(actions, self._extent)
        self._follow_caller()
        for stage in self.stages:
            if stage.weights is not None:
                stage.predict.writes(stage.working)
                with stage.predict:
                    stage.weights.begin()
                self._loaded(stage)

    def _end(self) -> None:
        """Put the true weights back, and let the caller's work follow all of this."""
        self._results.clear()
        for stage in self.stages:
            stage.input_gradients.reset()
            if stage.weights is not None:
                stage.predict.wait(stage.computed)
                stage.predict.writes(stage.working)
                with stage.predict:
                    stage.weights.end()
                self._loaded(stage)
        self._losses.reset()
        self.let_caller_follow()
        self.running = False

    def _drop_everything(self) -> None:
        """After a failure: wait until no stream works any more, and forget what was in flight."""
        for stream in self._streams():
            stream.synchronize()
        for stage in self.stages:
            stage.tapes.clear()
            stage.ahead.reset()
            if stage.back is not None:
                stage.back.reset()
        self._targets.reset()

    def _streams(self) -> Iterator[Stream]:
        for stage in self.stages:
            yield stage.compute
            yield stage.predict
            yield stage.ahead.stream
            if stage.back is not None:
                yield stage.back.stream
        yield self._targets.stream

    def _follow_caller(self) -> None:
        """Everything issued from here on follows what the caller has issued so far, on every device."""
        for device in {stage.device for stage in self.stages}:
            caller = callers_stream(device)
            event = caller.event()
            caller.record(event)
            for stream in self._streams():
                stream.wait(event)

    def let_caller_follow(self) -> None:
        """What the caller issues from here on follows every computation and load issued so far."""
        for stage in self.stages:
            caller = callers_stream(stage.device)
            caller.wait(stage.computed)
            caller.wait(stage.loaded)

    def follow_reader(self) -> None:
        """Loads and updates issued from here on follow what the caller has issued so far."""
        for stage in self.stages:
            caller = callers_stream(stage.device)
            event = caller.event()
            caller.record(event)
            stage.predict.wait(event)

    # The loop.

    def _steps(self) -> Iterator[Result]:
        """Give the stages their turns until all have finished."""
        while True:
            progress = finished = 0
            for stage in self.stages:
                if stage.cursor.head() is None:
                    finished += 1
                    continue
                progress += self._turn(stage)
                while self._results:
                    yield self._results.popleft()
            if finished == len(self.stages):
                return
            if not progress:
                heads = ", ".join(f"{s.index}: {s.cursor.head()}" for s in self.stages)
                raise RuntimeError(f"no stage can go on; they stand at {heads}")

    def _turn(self, stage: Stage) -> bool:
        """One forward, or one minibatch's backwards with the update; less where an input is missing."""
        cursor = stage.cursor
        progress = False
        while (action := cursor.head()) is not None:
            kind, i, j = action
            if kind is Kind.RECEIVE_ACTIVATION:
                if not stage.ahead.has(i, j):
                    break
            elif kind is Kind.RECEIVE_GRADIENT and not self._back(stage).has(i, j):
                break
            cursor.advance()
            progress = True
            try:
                self._run[kind](stage, action)
            except Exception as error:
                if kind is Kind.PULL:  # the caller's own iterator, or what came out of it
                    raise
                reason = f"{type(error).__name__}: {error}"
                raise StageError(stage.index, i, kind.value, reason) from error
            if kind in _ENDS_TURN:
                break
        return progress

    @staticmethod
    def _back(stage: Stage) -> Edge:
        assert stage.back is not None, "the last stage receives no gradient"
        return stage.back

    # Batches.

    def _pull(self, stage: Stage, action: Action) -> None:
        i = action.minibatch
        try:
            batch = next(self._batches)
        except StopIteration:
            self._extent.minibatches = i
            return
        parts = split(batch, i, self._microbatches)
        self._pulled = i + 1
        self._extent.parts[i] = len(parts)
        self._shares[i] = [part.share for part in parts]
        for j, part in enumerate(parts):
            self._hand_in(stage.ahead, part.input, i, j)
            self._hand_in(self._targets, part.target, i, j)

    def _hand_in(self, edge: Edge, value: Value, i: int, j: int) -> None:
        message = _message(value)
        device = message.tensors[0].device if message.tensors[0] is not None else torch.device("cpu")
        caller = callers_stream(device)
        given = caller.event()
        caller.writes(self._batch)
        caller.record(given)
        copied = edge.send(i, j, message, self._batch, given)
        # From host to device nobody waits: the call has read pageable memory when it returns, and torch's
        # allocator keeps pinned memory until it has been read.
        if device.type != "cpu" or edge.target.type == "cpu":
            caller.wait(copied)

    # Weights.

    def _load_forward(self, stage: Stage, action: Action) -> None:
        if stage.weights is not None:
            self._load(stage, stage.weights, stage.weights.for_forward(action.minibatch))

    def _load_backward(self, stage: Stage, action: Action) -> None:
        if stage.weights is not None:
            self._load(stage, stage.weights, stage.weights.for_backward(action.minibatch))
            stage.weights.forget(action.minibatch)

    def _load(self, stage: Stage, weights: StageWeights, content: Content) -> None:
        if weights.holds(content):
            return
        stage.predict.wait(stage.computed)
        stage.predict.writes(stage.working)
        with stage.predict:
            weights.load(content)
        self._loaded(stage)

    @staticmethod
    def _loaded(stage: Stage) -> None:
        """What the stage computes from here on follows the weights just written."""
        stage.predict.record(stage.loaded)
        stage.compute.wait(stage.loaded)

    def _update(self, stage: Stage, action: Action) -> None:
        if stage.index == 0:
            del self._shares[action.minibatch], self._extent.parts[action.minibatch]
        if stage.weights is None:
            return
        upcoming = stage.cursor.head()
        forward_is_next = upcoming is not None and upcoming.kind in _STARTS_FORWARD
        predict = stage.predict
        predict.wait(stage.computed)
        predict.reads(stage.gradients)
        predict.writes(stage.working)
        with predict:
            stage.weights.update(forward_is_next)
        self._loaded(stage)
        stage.compute.writes(stage.gradients)  # they are gone: their memory is the compute stream's again

    # Computation.

    def _receive_activation(self, stage: Stage, action: Action) -> None:
        stage.received = stage.ahead.receive(action.minibatch, action.microbatch)

    def _receive_gradient(self, stage: Stage, action: Action) -> None:
        stage.received = self._back(stage).receive(action.minibatch, action.microbatch)

    def _forward(self, stage: Stage, action: Action) -> None:
        _, i, j = action
        message, buffer = stage.received
        compute = stage.compute
        compute.reads(stage.working)
        compute.writes(buffer)  # an in-place first layer does
        tape = _Tape(f"activations {i}.{j} of stage {stage.index}")
        values: list[Tensor] = []
        with compute, torch.enable_grad(), stage.random:
            for tensor, differentiable in zip(message.tensors, message.differentiable, strict=True):
                assert tensor is not None
                value = tensor.detach()
                leaf = None
                if differentiable:
                    leaf = value.requires_grad_()
                    value = _Entry.apply(leaf)
                tape.leaves.append(leaf)
                values.append(value)
            tape.output = stage.module(values[0] if message.single else tuple(values))
        tape.message = _message(tape.output)
        compute.writes(tape.buffer)
        compute.record(stage.computed)
        stage.tapes[i, j] = tape

    def _send_activation(self, stage: Stage, action: Action) -> None:
        _, i, j = action
        tape = stage.tapes[i, j]
        to = self.stages[stage.index + 1]
        to.ahead.send(i, j, tape.message, tape.buffer, stage.computed)

    def _loss(self, stage: Stage, action: Action) -> None:
        _, i, j = action
        tape = stage.tapes[i, j]
        message, buffer = self._targets.receive(i, j)
        target = message.tensors[0] if message.single else message.tensors
        share = self._shares[i][j]
        compute = stage.compute
        compute.writes(buffer)
        with compute:
            with torch.enable_grad(), stage.random:
                loss = self._loss_fn(tape.output, target)
            _check_loss(loss, tape)
            part = loss.detach()
            if len(self._shares[i]) > 1:
                part = part * share if j == 0 else self._partial_loss + part * share
        tape.output = loss
        self._partial_loss = part
        compute.writes(tape.buffer)
        compute.record(stage.computed)
        if j == len(self._shares[i]) - 1:
            self._hand_out(stage, i, part)

    def _hand_out(self, stage: Stage, i: int, loss: Tensor) -> None:
        """Give the caller a loss in memory of its own stream."""
        buffer = Buffer(f"loss {i}")
        stage.compute.writes(buffer)
        stage.compute.record(stage.computed)
        caller = callers_stream(stage.device)
        caller.wait(stage.computed)
        caller.reads(buffer)
        self._results.append(Result(i, loss.clone()))
        read = caller.event()
        caller.record(read)
        self._losses.hold(read, buffer, loss)

    def _backward(self, stage: Stage, action: Action) -> None:
        _, i, j = action
        tape = stage.tapes.pop((i, j))
        compute = stage.compute
        compute.reads(stage.working)
        compute.reads(tape.buffer)
        compute.writes(stage.gradients)
        roots: list[Tensor]
        gradients: list[Tensor | None]
        with compute:
            if stage is self._last:
                loss, share = tape.output, self._shares[i][j]
                assert isinstance(loss, Tensor)
                roots = [loss] if loss.requires_grad else []
                gradients = [None if share == 1.0 else torch.full_like(loss, share)]
            else:
                message, buffer = stage.received
                compute.reads(buffer)
                outputs = tape.output if isinstance(tape.output, tuple) else (tape.output,)
                pairs = [p for p in zip(outputs, message.tensors, strict=True) if p[1] is not None]
                roots, gradients = [p[0] for p in pairs], [p[1] for p in pairs]
            if roots:
                torch.autograd.backward(roots, gradients)
        stage.outgoing = tuple(None if leaf is None else leaf.grad for leaf in tape.leaves)
        compute.writes(tape.buffer)  # freed
        compute.record(stage.computed)
        stage.ahead.free(i, j)
        (self._targets if stage is self._last else self._back(stage)).free(i, j)

    def _send_gradient(self, stage: Stage, action: Action) -> None:
        _, i, j = action
        buffer = Buffer(f"input gradient {i}.{j} of stage {stage.index}")
        stage.compute.writes(buffer)
        stage.compute.record(stage.computed)
        to = self._back(self.stages[stage.index - 1])
        sent = to.send(i, j, Message(stage.outgoing), buffer, stage.computed)
        stage.input_gradients.hold(sent, buffer, stage.outgoing)
        stage.outgoing = ()


_STARTS_FORWARD = (Kind.PULL, Kind.LOAD_FORWARD)
_ENDS_TURN = (Kind.SEND_ACTIVATION, Kind.LOSS, Kind.UPDATE)


def _message(value: object) -> Message:
    """What to send of an activation.

    Raises:
        TypeError: it is neither a tensor nor a tuple of tensors.
    """
    single = isinstance(value, Tensor)
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            inside = f" with a {type(tensor).__name__} in it" if isinstance(value, tuple) else ""
            raise TypeError(
                f"a stage must return a tensor or a tuple of tensors, got a {type(value).__name__}{inside}"
            )
    return Message(
        tuple(tensor.detach() for tensor in tensors),
        single,
        tuple(tensor.requires_grad for tensor in tensors),
    )


def _check_loss(loss: object, tape: _Tape) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a 0-d tensor, got a {type(loss).__name__}")
    if loss.dim():
        raise ValueError(
            f"loss_fn must return a scalar (a 0-d tensor), got shape {tuple(loss.shape)}: take its mean"
        )
    if not loss.requires_grad and any(tape.message.differentiable):
        raise ValueError("loss_fn returned a loss that does not depend on the output by autograd")
