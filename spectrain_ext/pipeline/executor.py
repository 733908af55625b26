"""Executor: runs the actions of all stages of a process, in one thread.

They run as their inputs arrive, or in an order in which each may wait for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TypeAlias
from weakref import ref

from spectrain_ext.errors import RankError, StageError, make_all, noted_on
from spectrain_ext.interrupts import STATE, boundary, callers, deferred
from spectrain_ext.schedule import Generator as Schedule
from spectrain_ext.schedule import Instruction, Kind, Place, find_generator, lower
from spectrain_ext.transport import Stream, callers_stream, captured

from .cursor import Cursor, Extent
from .losses import Keep, Result
from .neighbourhood import Neighbourhood, Work
from .observer import Observer
from .stage import Handler, Stage

_Run: TypeAlias = Generator[Result, None, None]


def _no_run() -> None:
    """No run has begun."""


# A turn is one forward, or one backward or half of one, with the update that may follow; these
# begin the next.
_BEGINS_TURN = frozenset(
    (Kind.PULL, Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD, Kind.LOAD_BACKWARD_INPUT)
)
# What a forward's turn is made of, where turns come in an order and an update is one of its own.
_FORWARDS = frozenset(
    (
        *(Kind.PULL, Kind.LOAD_FORWARD, Kind.RECEIVE_ACTIVATION),
        *(Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.LOSS),
    )
)


class Executor:
    """The stages of this process, and the loop that drives them.

    Args:
        stages: the stages of this process.
        places: the places of all stages of the pipeline.
        schedule: the order in which they act, by name, or its generator.
        around: what the stages are connected to.
        evaluates: whether the stages only go forward.

    Attributes:
        places, stages: as given.

    Whatever exception ends a run, the true weights are put back: at once, or, if the end did not
    come to its end, by the next ``mend``. All that an end does may be repeated.
    """

    def __init__(
        self,
        stages: list[Stage],
        places: list[Place],
        schedule: str | Schedule,
        around: Neighbourhood,
        evaluates: bool = False,
    ) -> None:
        self._evaluates = evaluates
        self._run: Callable[[], _Run | None] = _no_run
        self._ended = True
        self.stages = stages
        self._around = around
        self.change(places, schedule)

    def change(self, places: list[Place], schedule: str | Schedule) -> None:
        """Have the stages act in another order from the next run on."""
        self.places = places
        self._schedule = find_generator(schedule)

    # A run.

    def run(
        self,
        batches: Iterator[object],
        trace: Observer | None = None,
        keep: Keep | None = None,
    ) -> Iterator[Result]:
        """Train on every batch; yields results in order, each as soon as its loss has been issued.

        Closing the generator finishes the minibatches in flight and takes no further batch.
        """
        self._extent = Extent(0)
        itself: list[Callable[[], _Run | None]] = []
        run = self._results_of(batches, trace, keep, itself)
        itself.append(ref(run))
        return run

    def _results_of(
        self,
        batches: Iterator[object],
        trace: Observer | None,
        keep: Keep | None,
        itself: list[Callable[[], _Run | None]],
    ) -> _Run:
        with deferred(), self._around.run():
            self._check()
            if self._captured():
                raise RuntimeError("run: a pipeline's run cannot become part of a CUDA graph")
            self._run = itself[0]
            self._ended = False
            try:
                self._begin(batches, keep)
                try:
                    for result in self._steps(trace):
                        if trace is not None:
                            trace.result(result)
                        with callers():
                            yield result
                        self._check_storage()
                except GeneratorExit:
                    self._around.leave()
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
    def begun(self) -> int:
        """The minibatches that the last run has begun."""
        return self._extent.added

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended: its generator can go on.

        No exception can keep that from being true, as it could an attribute.
        """
        run = self._run()
        return run is not None and getgeneratorstate(run) != GEN_CLOSED

    def mend(self) -> None:
        """End a run whose end was cut short, as by a second Ctrl-C."""
        if not self._ended and not self.running:
            self._fail()

    def _fail(self) -> None:
        """Forget what is in flight and end the run."""
        with deferred():
            make_all((self._drop, self._end))

    def _begin(self, batches: Iterator[object], keep: Keep | None) -> None:
        in_flight = max(place.window // place.microbatches for place in self.places) + 2
        self._extent = Extent(in_flight)
        self.follow_caller()
        for stage in self.stages:
            place = self.places[stage.index]
            instructions = lower(self._schedule(place), place, self._evaluates)
            stage.begin(Cursor(instructions, self._extent), self._extent)
        self._order = self._around.order(self._schedule, self.places)
        self._late: list[tuple[Stage, Instruction]] = []
        self._around.begin(batches, self._extent, keep)

    def _check(self) -> None:
        """Raise an error if a parameter is not where, or not what, it was when stages were made."""
        for stage in self.stages:
            stage.check()

    def _check_storage(self) -> None:
        """The same for what the caller may have done meanwhile, at the cost of a few addresses."""
        for stage in self.stages:
            if stage.weights is not None and not stage.weights.in_place():
                self._check()

    def _end(self) -> None:
        """Put the true weights back, and let the caller's work follow all of this."""
        ends = [stage.end for stage in self.stages]
        make_all((*ends, self._around.end, self.let_caller_follow))
        self._ended = True

    def _drop(self) -> None:
        """After a failure: wait until no stream works any more, and forget what was in flight.

        What comes follows the caller, who may have used the weights since. All of this is tried,
        as a device that has failed lets none of it succeed.
        """
        streams = list(self._streams())
        for stream in streams:
            stream.leave()
        waits = (stream.synchronize for stream in streams)
        forgets = (stage.forget for stage in self.stages)
        resets = (edge.reset for edge in self._around.edges())
        make_all((*waits, *forgets, *resets, self.follow_caller))

    def free_rings(self) -> None:
        """Free all receive buffers; a run makes new ones as it needs them."""
        for edge in self._around.edges():
            edge.free_storage()

    def _streams(self) -> Iterator[Stream]:
        for stage in self.stages:
            yield stage.compute
            yield stage.predict
        for edge in self._around.edges():
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
        around, results = self._around, self._around.results
        # Made per run: kept, these methods would make a cycle that holds all buffers until a
        # garbage collection.
        unfinished = [(stage, around.work_of(stage, trace)) for stage in self.stages]
        if self._order is not None:
            yield from self._in_order(self._order, {pair[0].index: pair for pair in unfinished})
            unfinished = []
        while unfinished:
            progress = False
            for stage, work in unfinished:
                progress |= self._turn(stage, work)
                while results:
                    yield results.popleft()
            unfinished = [pair for pair in unfinished if pair[0].cursor.head() is not None]
            if unfinished and not progress:
                heads = ", ".join(f"stage {s.index} at {s.cursor.head()}" for s, _ in unfinished)
                raise RuntimeError(f"no stage can go on: {heads}")
        around.close()

    def _turn(self, stage: Stage, work: Work) -> bool:
        """Run a stage's actions to the end of a turn, or to an input that has not arrived."""
        cursor = stage.cursor
        action = cursor.head()
        progress = False
        while action is not None:
            kind, i, j = action
            ready, handler = work[kind]
            if ready is not None and not ready(i, j):
                # A new head: the run has turned out to be shorter.
                return progress or cursor.head() is not action
            cursor.upcoming = next(cursor.instructions, None)
            progress = True
            self._act(stage, handler, action)
            action = cursor.head()
            if action is not None and action.kind in _BEGINS_TURN and kind is not Kind.PULL:
                break
        return progress

    def _in_order(
        self, order: Iterator[tuple[int, Instruction]], of: dict[int, tuple[Stage, Work]]
    ) -> Iterator[Result]:
        """Give the stages their turns in an order, which goes on after the end of the run.

        Updates may have to wait for what comes after them: for the norm of another stage's
        gradients. They are late, and keep only their own stage.
        """
        extent, results = self._extent, self._around.results
        while extent.minibatches is None or any(s.cursor.head() for s, _ in of.values()):
            k, turn = next(order)
            stage = of[k][0]
            if any(s is stage for s, _ in self._late):
                raise RuntimeError(f"no stage can go on: stage {k} at {stage.cursor.head()}")
            self._late.append((stage, turn))
            self._late = [(s, t) for s, t in self._late if not self._took(s, of[s.index][1], t)]
            while results:
                yield results.popleft()

    def _took(self, stage: Stage, work: Work, turn: Instruction) -> bool:
        """Run a turn, or what the run has of it; whether it has ended."""
        cursor = stage.cursor
        kind, i, j = turn
        action = cursor.head()
        while action is not None and action[1:] == (i, j) and _same_turn(kind, action.kind):
            ready, handler = work[action.kind]
            if ready is None or ready(i, j):
                cursor.advance()
                self._act(stage, handler, action)
            elif cursor.head() is action:
                return False
            action = cursor.head()
        return True

    def _act(self, stage: Stage, handler: Handler, action: Instruction) -> None:
        """Run an action; its exception becomes the stage's."""
        kind, i, j = action
        if STATE.pending is not None:
            boundary()
        try:
            handler(i, j)
        except RankError:
            raise
        except Exception as error:
            if kind is Kind.PULL:  # the caller's own iterator, or what came out of it
                raise
            notes = getattr(error, "__notes__", ())
            reason = "; ".join((f"{type(error).__name__}: {error}", *notes))
            raise StageError(stage.index, i, kind.value, reason) from error


def _same_turn(turn: Kind, kind: Kind) -> bool:
    """Whether an action of the same microbatch belongs to this forward, backward or update."""
    if turn is Kind.UPDATE or kind is Kind.UPDATE:
        return turn is kind
    return (turn is Kind.FORWARD) == (kind in _FORWARDS)
