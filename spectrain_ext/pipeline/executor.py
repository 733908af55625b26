"""Runs the instructions of all stages of a process, in one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from typing import NamedTuple
from weakref import ref

from spectrain_ext.errors import RankError, StageError, make_all, noted_on
from spectrain_ext.interrupts import STATE, boundary, callers, deferred
from spectrain_ext.schedule import Generator as Schedule
from spectrain_ext.schedule import Instruction, Kind, Place, find_generator, steps
from spectrain_ext.schedule.lowering import ORDER
from spectrain_ext.transport import Stream, callers_stream, captured

from .connections import Connections, Ready
from .edges import Cursor
from .losses import Keep, Result
from .observer import Observer, with_observers
from .passes import Handler
from .stage import Stage


class _Step(NamedTuple):
    """One instruction of the lowered stream, and the handler that runs it."""

    kind: Kind
    ready: Ready | None  # whether its input has arrived; None: it has no input, or blocks
    run: Handler


class _Program:
    """The steps of each compute instruction of a stage."""

    def __init__(
        self, stage: Stage, connections: Connections, observers: Sequence[Observer]
    ) -> None:
        self.stage = stage
        handlers = with_observers(observers, stage, connections.handlers(stage))
        ready = connections.ready(stage)
        self.announce = connections.announce(stage)
        # Compute instructions that run in the same turn as the one before them: an update, and in
        # an evaluation the notice that a batch is finished.
        self.takes: tuple[Kind, ...] = (Kind.UPDATE,)
        if connections.evaluates:
            self.takes = Kind.UPDATE, Kind.BACKWARD
        self.first, self.later = (
            {
                kind: [
                    _Step(each, ready.get(each), handlers[each])
                    for each in steps(kind, handlers, connections.receives_block, first)
                ]
                for kind in ORDER
            }
            for first in (True, False)
        )


class Executor:
    """The stages of this process, and the loop that runs them."""

    places: list[Place]  # of all stages of the pipeline
    _schedule: Schedule

    def __init__(self, stages: list[Stage], connections: Connections) -> None:
        self.stages, self.connections = stages, connections
        self._run: ref[Generator[Result, None, None]] | None = None
        self._ended = True
        self._counts: Cursor | None = None  # of the last run
        self._results: deque[Result] = deque()  # waiting for updates

    def change(self, places: list[Place], schedule: str | Schedule) -> None:
        self.places = places
        self._schedule = find_generator(schedule)

    # A run.

    def run(
        self,
        batches: Iterator[object],
        observers: Sequence[Observer] = (),
        keep: Keep | None = None,
    ) -> Generator[Result, None, None]:
        """Train on every batch; yield results in order, each after this process's last update."""
        self._counts = None
        run = self._results_of(batches, observers, keep)
        self._run = ref(run)
        return run

    def _results_of(
        self, batches: Iterator[object], observers: Sequence[Observer], keep: Keep | None
    ) -> Generator[Result, None, None]:
        with deferred(), self.connections.run():
            self._check()
            if self._captured():
                raise RuntimeError("run: a pipeline's run cannot become part of a CUDA graph")
            self._ended = False
            try:
                self._begin(batches, keep)
                try:
                    for result in self._steps(observers):
                        self.connections.yields(result)
                        for stage in self.stages:
                            stage.lend()
                        with callers():
                            yield result
                        self._take_back()
                except GeneratorExit:
                    self.connections.leave()
                    self._take_back()
                    for _ in self._steps(observers):
                        pass
                self._check()
                self._end()
            except BaseException as error:
                with noted_on(error):
                    self._fail()
                raise

    @property
    def begun(self) -> int:
        """How many minibatches the last run has begun."""
        return 0 if self._counts is None else self._counts.added

    @property
    def running(self) -> bool:
        # Ask the generator: an exception could leave an attribute wrong.
        run = None if self._run is None else self._run()
        return run is not None and getgeneratorstate(run) in (GEN_RUNNING, GEN_SUSPENDED)

    def finish_interrupted(self) -> None:
        """End a run whose end was cut short, for example by a second Ctrl-C."""
        if not self._ended and not self.running:
            self._fail()

    def _fail(self) -> None:
        with deferred():
            make_all((self._abandon, self._end))

    def _begin(self, batches: Iterator[object], keep: Keep | None) -> None:
        self.follow_caller()
        connections = self.connections
        for stage in self.stages:
            cursor = Cursor(self._schedule(self.places[stage.index]))
            stage.begin(cursor, connections.edges[stage.index], connections.mode)
        self._counts = self.stages[0].cursor
        self._order = connections.order(self._schedule, self.places)
        connections.begin(batches, keep)

    def _check(self) -> None:
        """Raise an error if a parameter has been moved or replaced since the stages were made."""
        for stage in self.stages:
            stage.check()

    def _take_back(self) -> None:
        """Take gradients and optimizers back from the caller, who may have moved parameters."""
        for stage in self.stages:
            weights = stage.weights
            # Comparing a few addresses costs less than ``_check``.
            if weights is not None and weights.storage and not weights.storage.in_place():
                self._check()
            stage.take_back()

    def _end(self) -> None:
        """Put the true weights back and let the caller's streams follow; may be repeated."""
        ends = [stage.end for stage in self.stages]
        make_all((*ends, self.connections.end, self._results.clear, self.let_caller_follow))
        self._ended = True

    def _abandon(self) -> None:
        """After a failure: wait for all streams, and forget what was in flight."""
        streams = list(self._streams())
        for stream in streams:
            stream.leave()
        waits = (stream.synchronize for stream in streams)
        forgets = (stage.forget for stage in self.stages)
        resets = (edge.reset for edge in self.connections.local_edges)
        # Try everything: on a device that has failed none of it succeeds. At the end, follow the
        # caller, who may have used the weights since.
        make_all((*waits, *forgets, *resets, self.follow_caller))

    def _streams(self) -> Iterator[Stream]:
        for stage in self.stages:
            yield stage.compute
            yield stage.predict
        for edge in self.connections.receivers():
            yield edge.stream

    # The caller's stream is the one that is current at the call; it may change from call to call.
    # Work that is captured into a CUDA graph waits for no other stream; earlier work is done by
    # then.

    def _captured(self) -> bool:
        return any(captured(stage.device) for stage in self.stages)

    def follow_caller(self) -> None:
        """Order all later work of the stages after the caller's work so far."""
        if self._captured():
            return
        for stage in self.stages:  # the caller may have written them
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
        """Order the caller's later work after all computations and loads issued so far."""
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

    # The loop. Stage k of N runs a compute instruction once its input has arrived, then stage k + 1
    # runs one, and so on, until all have finished. For a 1F1B schedule (F: forward, B: backward and
    # the update that may follow) this gives
    #
    # stage 0   F0 F1 F2 B0 F3 B1 F4 B2 ...
    # stage 1      F0 F1 B0 F2 B1 F3 B2 ...
    # stage 2         F0 B0 F1 B1 F2 B2 ...
    #
    # Each of these consists of steps, see ``schedule/lowering.py``; F3 on stage 1, for example:
    # load forward weights, receive activation, forward, send activation.

    def _steps(self, observers: Sequence[Observer]) -> Iterator[Result]:
        """Run all stages in turn until all have finished."""
        connections, results = self.connections, self.connections.results
        # Made per run: if kept, these methods would form a cycle that holds all buffers until the
        # next garbage collection.
        programs = [_Program(stage, connections, observers) for stage in self.stages]
        if self._order is not None:
            for program in programs:
                program.takes = ()
            for _ in self._in_order(self._order, programs):
                yield from self._finished(observers)
            programs = []
        while programs:
            progress = finished = False
            for program in programs:
                progress |= self._turn(program)
                finished |= program.stage.cursor.finished
                if results or self._results:
                    yield from self._finished(observers)
            if finished:
                programs = [each for each in programs if not each.stage.cursor.finished]
            if programs and not progress:
                raise _stuck(programs)
        connections.close()

    def _finished(self, observers: Sequence[Observer]) -> Iterator[Result]:
        """Yield the results of minibatches that all stages of this process have updated from.

        Not when their losses are known: rank 0 of several processes learns that later. So the
        caller leaves a run after as many minibatches in any number of processes.
        """
        computed, in_flight = self.connections.results, self.stages[0].cursor.shares
        while computed:
            self._results.append(computed.popleft())
            for observer in observers:
                observer.result(self._results[-1])
        while self._results and self._results[0].index not in in_flight:
            yield self._results.popleft()

    def _turn(self, program: _Program) -> bool:
        """Run a stage's instruction, and those of the same turn, until one has to wait."""
        cursor, announce = program.stage.cursor, program.announce
        progress = False
        while cursor.current is not None or cursor.take() is not None:
            assert cursor.current is not None
            computes, i, j = cursor.current
            steps = (program.later if j else program.first)[computes]
            while cursor.step < len(steps):
                kind, ready, run = steps[cursor.step]
                if ready is not None and not ready(i, j):
                    return progress
                if STATE.pending is not None:
                    boundary()
                if announce is not None:
                    announce(kind, i, j)
                cursor.step += 1
                try:
                    run(i, j)
                except RankError:
                    raise
                except Exception as error:
                    if kind is Kind.PULL:  # the caller's own iterator, or a bad batch from it
                        raise
                    notes = getattr(error, "__notes__", ())
                    reason = "; ".join((f"{type(error).__name__}: {error}", *notes))
                    raise StageError(program.stage.index, i, kind.value, reason) from error
                progress = True
                if cursor.minibatches is not None and i >= cursor.minibatches:
                    break  # the stage has learned that the run ended before this
            cursor.current, progress = None, True
            if computes is Kind.UPDATE:  # the minibatch is over
                cursor.shares.pop(i, None)
            following = cursor.upcoming
            if following is None or following[0] not in program.takes:
                break
        return progress

    def _in_order(
        self, order: Iterator[tuple[int, Instruction]], programs: Sequence[_Program]
    ) -> Iterator[None]:
        """Run instructions in a given order, which may be longer than the run; yield after each."""
        of = {p.stage.index: p for p in programs}
        # Their updates wait for a later instruction: for the gradient norm of another stage.
        late: list[_Program] = []
        while any(p.stage.cursor.current or p.stage.cursor.peek() for p in programs):
            k, instruction = next(order)
            cursor = of[k].stage.cursor
            if cursor.current is not None:
                raise _stuck([of[k]])
            if cursor.peek() == instruction:  # otherwise the run does not contain it
                cursor.take()
                late.append(of[k])
            for program in late:
                self._turn(program)
            late = [program for program in late if program.stage.cursor.current is not None]
            yield


def _stuck(programs: Iterable[_Program]) -> RuntimeError:
    cursors = [(p.stage.index, p.stage.cursor) for p in programs]
    heads = ", ".join(f"stage {k} at {c.current or c.peek()}" for k, c in cursors)
    return RuntimeError(f"no stage can go on: {heads}")
