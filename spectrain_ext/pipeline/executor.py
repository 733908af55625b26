"""Executor: runs the actions of all stages of a process, in one thread, as their inputs arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TypeAlias
from weakref import ref

from torch import Tensor

from spectrain_ext.errors import RankError, StageError, make_all, noted_on
from spectrain_ext.schedule import Action, Kind, Place, find_generator
from spectrain_ext.transport import (
    Buffer,
    Edge,
    Sender,
    Stream,
    Transit,
    Value,
    callers_stream,
    captured,
)

from .batch import Microbatch, split
from .clipping import GlobalNorm
from .cursor import Cursor, Extent
from .observer import Observer, watched
from .stage import Stage
from .tape import activation


@dataclass(frozen=True, slots=True)
class Result:
    """One minibatch of a run.

    Attributes:
        index: its number within the run, counted from 0.
        loss: the loss of its forward, a detached 0-d tensor on the last stage's device. On CUDA the
            caller's current stream is ordered after its computation; the host has not waited.
    """

    index: int
    loss: Tensor

    def renumbered(self, index: int) -> Result:
        """The same result under another number."""
        return replace(self, index=index)


_Handler = Callable[[int, int], None]
_Run: TypeAlias = Generator[Result, None, None]


def _no_run() -> None:
    """No run has begun."""


# A turn is one forward, or one backward with the update that may follow; these begin the next.
_BEGINS_TURN = frozenset((Kind.PULL, Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD))


class Executor:
    """The stages of a pipeline, the edges between them, and the loop that drives them.

    Args:
        stages: the stages of this process.
        loss_fn: ``(output, target) -> 0-d tensor``.
        places: the places of all stages of the pipeline.
        schedule: the name of the order in which they act.
        norm: where the stages put their gradients' norms together, None: nowhere.

    Attributes:
        places: as given.

    Whatever exception interrupts a run, and wherever, the true weights are put back: at once, or,
    if the end was interrupted as well, by the next ``mend``. All that an end does may be repeated.
    """

    _inputs: Edge | None = None
    _targets: Edge | None = None

    def __init__(
        self,
        stages: list[Stage],
        loss_fn: Callable[..., Tensor],
        places: list[Place],
        schedule: str,
        norm: GlobalNorm | None = None,
    ) -> None:
        self._run: Callable[[], _Run | None] = _no_run
        self._ended = True
        self._loss_fn = loss_fn
        self.places = places
        self._schedule = schedule
        self._microbatches = places[0].microbatches
        self.stages = stages
        self._last = stages[-1]
        self._norm = norm
        self._connect()
        self._batch = Buffer("the caller's batch")
        self._losses_out = Transit(self._last.compute, len(places))
        self._results: deque[Result] = deque()
        self._part_of_loss: Tensor  # the last microbatch's
        self._partial_loss: Tensor  # the minibatch's so far
        self._loss_buffer: Buffer  # the memory of these

    def _connect(self) -> None:
        """Make the edges: batch -> stage 0, neighbours in both directions, batch -> loss.

        A ring has one slot more than its sender may have microbatches in flight. By the time a slot
        is written again, the sender has then heard of the end of the backward that read it, and
        whatever that backward passed on in the same memory has been copied. A batch comes in as a
        whole: there its other microbatches have slots as well.
        """

        self._take_inputs()
        self._take_targets()

        def edge(a: Stage, b: Stage, window: int) -> Edge:
            name = f"edge {a.index} -> {b.index}"
            return Edge(name, a.device, b.device, b.compute, window + 1)

        for a, b in zip(self.stages, self.stages[1:], strict=False):
            window = self.places[a.index].window
            a.to_next = b.inputs = edge(a, b, window)
            b.to_previous = a.gradients = edge(b, a, window)

    def _take_inputs(self) -> None:
        """Make the edge batch -> stage 0."""
        first = self.stages[0]
        first.inputs = self._inputs = self._entrance("edge batch -> 0", first)

    def _take_targets(self) -> None:
        """Make the edge batch -> loss."""
        self._last.targets = self._targets = self._entrance("edge batch -> loss", self._last)

    def _entrance(self, name: str, stage: Stage) -> Edge:
        depth = self.places[0].window + self._microbatches
        return Edge(name, None, stage.device, stage.compute, depth)

    def _handlers_of(self, stage: Stage) -> dict[Kind, _Handler]:
        return {
            Kind.PULL: self._pull,
            Kind.LOAD_FORWARD: stage.load_forward,
            Kind.RECEIVE_ACTIVATION: stage.receive_activation,
            Kind.FORWARD: stage.forward,
            Kind.SEND_ACTIVATION: stage.send_activation,
            Kind.LOSS: self._loss,
            Kind.LOAD_BACKWARD: stage.load_backward,
            Kind.RECEIVE_GRADIENT: stage.receive_gradient,
            Kind.BACKWARD: stage.backward,
            Kind.SEND_GRADIENT: stage.send_gradient,
            Kind.UPDATE: stage.update,
        }

    # A run.

    def run(self, batches: Iterator[object], trace: Observer | None = None) -> Iterator[Result]:
        """Train on every batch; yields results in order, each as soon as its loss has been issued.

        Closing the generator finishes the minibatches in flight and takes no further batch.
        """
        itself: list[Callable[[], _Run | None]] = []
        run = self._results_of(batches, trace, itself)
        itself.append(ref(run))
        return run

    def _results_of(
        self,
        batches: Iterator[object],
        trace: Observer | None,
        itself: list[Callable[[], _Run | None]],
    ) -> _Run:
        self._check()
        if self._captured():
            raise RuntimeError("run: a pipeline's run cannot become part of a CUDA graph")
        self._run = itself[0]
        self._ended = False
        try:
            self._begin(batches)
            try:
                for result in self._steps(trace):
                    if trace is not None:
                        trace.result(result)
                    yield result
                    self._check_storage()
            except GeneratorExit:
                self._leave()
                self._check_storage()
                for _ in self._steps(trace):
                    pass
            self._check()
            self._end()
        except BaseException as error:
            with noted_on(error):
                self._fail()
            raise

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended: its generator can go on.

        No exception can keep that from being true, as it could an attribute.
        """
        run = self._run()
        return run is not None and getgeneratorstate(run) != GEN_CLOSED

    def mend(self) -> None:
        """End a run whose end was interrupted."""
        if not self._ended and not self.running:
            self._fail()

    def _fail(self) -> None:
        """Forget what is in flight and end the run; an interrupt has to wait for that."""
        interrupt: KeyboardInterrupt | None = None
        try:
            while not self._ended:
                try:
                    make_all((self._drop, self._end))
                except KeyboardInterrupt as error:
                    interrupt = error
        finally:
            try:
                if interrupt is not None:
                    raise interrupt
            finally:
                del interrupt  # whose traceback has this frame

    def _begin(self, batches: Iterator[object]) -> None:
        self._batches = batches
        in_flight = max(place.window // place.microbatches for place in self.places) + 2
        self._extent = Extent(in_flight)
        self.follow_caller()
        schedule = find_generator(self._schedule)
        for stage in self.stages:
            actions = schedule(self.places[stage.index])
            stage.begin(Cursor(actions, self._extent), self._extent)

    def _leave(self) -> None:
        """Begin no minibatch that has not begun."""
        self._extent.stop()

    def _check(self) -> None:
        """Raise RuntimeError if a parameter left its flat buffer."""
        for stage in self.stages:
            if stage.weights is not None:
                stage.weights.check(stage.index)

    def _check_storage(self) -> None:
        """The same for what the caller may have done meanwhile, at the cost of a few addresses."""
        for stage in self.stages:
            if stage.weights is not None and not stage.weights.in_place():
                self._check()

    def _end(self) -> None:
        """Put the true weights back, and let the caller's work follow all of this."""
        self._results.clear()
        if self._norm is not None:
            self._norm.reset()
        ends = [stage.end for stage in self.stages]
        make_all((*ends, self._losses_out.reset, self.let_caller_follow))
        self._ended = True

    def _drop(self) -> None:
        """After a failure: wait until no stream works any more, and forget what was in flight.

        What comes follows the caller, who may have used the weights since. All of this is tried,
        as a device that has failed lets none of it succeed.
        """
        streams = list(self._streams())
        for stream in streams:
            stream.leave()
        make_all(stream.synchronize for stream in streams)
        for stage in self.stages:
            stage.drop()
        self.follow_caller()

    def free_rings(self) -> None:
        """Free all receive buffers; a run makes new ones as it needs them."""
        for stage in self.stages:
            for edge in stage.edges():
                edge.free_storage()

    def _streams(self) -> Iterator[Stream]:
        for stage in self.stages:
            yield stage.compute
            yield stage.predict
            for edge in stage.edges():
                yield edge.stream

    # The caller's stream is the one that is current at the call: it may be another one each time.
    # What becomes part of a CUDA graph takes in no other stream; what came before has been done.

    def _captured(self) -> bool:
        """Whether the caller's work becomes part of a CUDA graph."""
        return any(captured(stage.device) for stage in self.stages)

    def follow_caller(self) -> None:
        """Everything issued from here on follows what the caller has issued so far."""
        if self._captured():
            return
        for stage in self.stages:  # the caller may have changed them
            for buffer in stage.shared:
                callers_stream(stage.device).writes(buffer)
        for device in {stage.device for stage in self.stages}:
            caller = callers_stream(device)
            event = caller.event()
            caller.record(event)
            for stream in self._streams():
                stream.wait(event)
        for stage in self.stages:
            stage.compute.record(stage.computed)
            stage.predict.record(stage.loaded)

    def let_caller_follow(self) -> None:
        """What the caller issues from here on follows every computation and load issued so far."""
        if self._captured():
            return
        for stage in self.stages:
            caller = callers_stream(stage.device)
            caller.wait(stage.computed)
            caller.wait(stage.loaded)
            for buffer in stage.shared:
                caller.may_read(buffer)

    @contextmanager
    def callers_turn(self) -> Iterator[None]:
        """Inside, the caller's stream may use weights, optimizer state and module buffers."""
        self.let_caller_follow()
        yield
        self.follow_caller()

    # The loop.

    def _steps(self, trace: Observer | None) -> Iterator[Result]:
        """Give the stages their turns until all have finished."""
        results = self._results
        # Made per run: kept, these methods would make a cycle that holds all buffers until a
        # garbage collection.
        unfinished = [
            (stage, watched(trace, stage, self._handlers_of(stage))) for stage in self.stages
        ]
        while unfinished:
            progress = False
            for stage, handlers in unfinished:
                progress |= self._turn(stage, handlers)
                while results:
                    yield results.popleft()
            unfinished = [pair for pair in unfinished if pair[0].cursor.head() is not None]
            if unfinished and not progress:
                heads = ", ".join(f"stage {s.index} at {s.cursor.head()}" for s, _ in unfinished)
                raise RuntimeError(f"no stage can go on: {heads}")

    def _turn(self, stage: Stage, handlers: dict[Kind, _Handler]) -> bool:
        """Run a stage's actions to the end of a turn, or to an input that has not arrived."""
        cursor = stage.cursor
        action = cursor.head()
        progress = False
        while action is not None:
            kind, i, _ = action
            if kind is Kind.RECEIVE_ACTIVATION:
                if not stage.inputs.has():
                    break
            elif kind is Kind.RECEIVE_GRADIENT:
                assert stage.gradients is not None
                if not stage.gradients.has():
                    break
            elif kind is Kind.UPDATE and self._norm is not None:
                progress |= stage.give_norm(i)
                if not self._norm.complete(i):
                    break
            cursor.advance()
            progress = True
            self._act(stage, handlers[kind], action)
            action = cursor.head()
            if action is not None and action.kind in _BEGINS_TURN and kind is not Kind.PULL:
                break
        return progress

    def _act(self, stage: Stage, handler: _Handler, action: Action) -> None:
        """Run an action; its exception becomes the stage's."""
        kind, i, j = action
        try:
            handler(i, j)
        except RankError:
            raise
        except Exception as error:
            if kind is Kind.PULL:  # the caller's own iterator, or what came out of it
                raise
            reason = f"{type(error).__name__}: {error}"
            raise StageError(stage.index, i, kind.value, reason) from error

    # What goes in and comes out.

    def _pull(self, i: int, j: int) -> None:
        for part in self._next_batch(i):
            self._hand_in(self._inputs, part.input)
            self._hand_in(self._targets, part.target)

    def _next_batch(self, i: int) -> list[Microbatch]:
        """Take the caller's next batch and make the run longer, or end it; empty: there is none."""
        try:
            batch = next(self._batches)
        except StopIteration:
            self._extent.stop()
            return []
        parts = split(batch, i, self._microbatches)
        self._extent.add([part.share for part in parts])
        return parts

    def _hand_in(self, edge: Sender | None, value: Value) -> None:
        """Send a side of the batch where it is used, if that is in this process."""
        if edge is None:
            return
        tensors = value if isinstance(value, tuple) else (value,)
        callers = {tensor.device: callers_stream(tensor.device) for tensor in tensors}
        given = []
        for caller in callers.values():
            caller.writes(self._batch)
            given.append(caller.event())
            caller.record(given[-1])
        read = edge.send(activation(value).without_gradient(), self._batch, *given)
        # From host to device nobody waits: the call has read pageable memory when it returns, and
        # torch's allocator keeps pinned memory until it has been read.
        for device, caller in callers.items():
            if device.type != "cpu" or edge.target.type == "cpu":
                caller.wait(read)

    def _loss(self, i: int, j: int) -> None:
        loss = self._last.loss(i, j, self._loss_fn)
        shares = self._extent.shares[i]
        if j == 0:
            self._loss_buffer = Buffer("loss")
        with self._last.compute.using(writes=(self._loss_buffer,)):
            self._part_of_loss = loss if shares[j] == 1.0 else loss * shares[j]
            loss = self._part_of_loss if j == 0 else self._partial_loss + self._part_of_loss
        self._partial_loss = loss
        if j == len(shares) - 1:
            self._hand_out(i, loss)

    def _hand_out(self, i: int, loss: Tensor) -> None:
        """Give the caller a loss in memory of its own stream."""
        last, buffer = self._last, self._loss_buffer
        last.compute.record(last.computed)
        caller = callers_stream(last.device)
        caller.wait(last.computed)
        caller.reads(buffer)
        self._results.append(Result(i, loss.clone()))
        read = caller.event()
        caller.record(read)
        self._losses_out.hold(read, buffer, loss)
