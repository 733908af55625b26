"""Runs the stages of a process once: begins, lets them advance by turns, and ends."""

from __future__ import annotations

import atexit
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from functools import partial
from inspect import GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, ref

from torch.autograd import profiler

from spectrain_ext.errors import make_all, noted_on
from spectrain_ext.interrupts import callers, deferred
from spectrain_ext.schedule import Instruction, Kind, find_generator, flushes

from .compute import Mode
from .cursor import Cursor
from .loops import CallersLoop
from .losses import Keep, Losses, Result, measuring
from .norms import GlobalNorm
from .passes import Handler, chained, hooks
from .processes import Processes
from .stage import Stage
from .stage_run import StageRun
from .wires import Wires

if TYPE_CHECKING:
    from .observer import Observer

_made: WeakSet[Run] = WeakSet()  # of all pipelines


class Work(NamedTuple):
    """The settings of a run: what it computes, and from where it counts."""

    mode: Mode
    call: Callable[..., Any]  # the loss function; in an evaluation, what measures
    has_count: bool = False  # whether ``count`` gives the divisors of the losses in advance
    minibatches: int = 0  # of training, before the run
    done: int = 0  # those of them under the same method
    keep: Keep | None = None
    observers: Sequence[Observer] = ()


class _Level(Sized):
    """An input of updates, empty while the stage is an update ahead of another one here."""

    def __init__(self, run: Run, cursor: Cursor) -> None:
        self._run, self._cursor = run, cursor

    def __len__(self) -> int:
        return self._cursor.updated <= self._run.updated


class Run:
    """One training or evaluation of the stages of this process.

    Attributes:
        wires: the stages and their edges.
        processes: what the run asks of other processes.
        work: what it does.
        stages: the stages in this run; empty before it begins, and once it has ended.
        losses: computes losses, on the last stage in a training.
        updated: minibatches that all stages of this process have updated from.
        results: computed losses, for the caller.
    """

    def __init__(
        self, wires: Wires, processes: Processes, work: Work, callers_loop: CallersLoop
    ) -> None:
        self.wires, self.processes, self.work = wires, processes, work
        self._callers_loop = callers_loop
        self._generator: ref[Generator[Result, None, None]] | None = None
        self._open = False  # whether it has begun, and not ended
        self._begun = 0  # minibatches, once it has ended
        self._end_look: Callable[[], None] | None = None  # see ``Pipeline.weights``
        self.losses: Losses | None = None
        self.stages: list[StageRun] = []
        self.updated = 0
        self.results: deque[Result] = deque()
        self._waiting: deque[Result] = deque()  # for updates
        self._norm: GlobalNorm | None = None
        self._order: Iterator[tuple[int, Instruction]] | None = None
        _made.add(self)

    @property
    def trains(self) -> bool:
        return self.work.mode is Mode.TRAIN

    @property
    def begun(self) -> int:
        """The number of minibatches that have begun."""
        return self.stages[0].cursor.added if self.stages else self._begun

    @property
    def running(self) -> bool:
        # Ask the generator: an exception could leave an attribute wrong.
        generator = None if self._generator is None else self._generator()
        states = GEN_RUNNING, GEN_SUSPENDED
        return generator is not None and getgeneratorstate(generator) in states

    def iterate(self, batches: Iterator[object]) -> Generator[Result, None, None]:
        """Run on every batch; yield results in order, each after this process's last update."""
        results = self._results(batches)
        self._generator = ref(results)
        return results

    def _results(self, batches: Iterator[object]) -> Generator[Result, None, None]:
        handled = sys.exception()  # by the caller
        with deferred(), self.processes.during(self.wires):
            self._check()
            if self.wires.captured():
                raise RuntimeError("run: a pipeline's run cannot become part of a CUDA graph")
            self._open = True
            try:
                self.wires.follow_caller()
                self._begin(self.wires.stages, batches)
                try:
                    for result in self._loop():
                        self.processes.yields(result)
                        for stage in self.wires.stages:
                            stage.lend()
                        with callers():
                            yield result
                        self._take_back()
                except GeneratorExit as end:
                    why = self._callers_loop.note_left(end, handled)
                    self.processes.leaves(result.index + 1, why)
                    self._leave()
                    self._take_back()
                    for _ in self._loop():
                        pass
                self._check()
                self._end()
            except BaseException as error:
                with noted_on(error):
                    self._fail()
                raise

    def _check(self) -> None:
        """Raise an error if a parameter has been moved or replaced since the stages were made."""
        for stage in self.wires.stages:
            stage.check()

    # Its beginning.

    def _begin(self, stages: Sequence[Stage], batches: Iterator[object]) -> None:
        work, wires, processes = self.work, self.wires, self.processes
        applied, tells = wires.applied, bool(hooks(stages[0].passes, "tells"))
        schedule = find_generator(applied.method.schedule)
        if self.trains and (applied.globally or (tells and flushes(applied.method.schedule))):
            self._norm = processes.norm()
        for stage in stages:
            place = applied.places[stage.index]
            cursor = Cursor(schedule(place), place.microbatches)
            edges = wires.edges[stage.index]
            run = StageRun(
                stage=stage,
                cursor=cursor,
                edges=edges,
                mode=work.mode,
                applied=applied,
                minibatches=work.minibatches,
                done=work.done,
                norm=self._norm,
            )
            self.stages.append(run)  # first, so that a failed begin is put back as well
            run.begin()
        last = self.stages[-1]
        if self.trains and last.edges.targets:
            replicas = processes.replicas.counts[-1]  # which then add up their losses
            held = replicas > 1 and not processes.own_minibatches
            self.losses = Losses(
                last=last,
                loss_fn=work.call,
                keep=work.keep,
                results=self.results,
                has_count=work.has_count,
                held=held,
            )
        self._order = processes.order(schedule, applied.places)
        wires.begin()
        processes.begin(self)
        if wires.source is not None:
            wires.source.begin(batches, self.stages[0].compute.pass_on_end)
        for end in wires.tie_ends if self.trains else ():
            end.begin(applied.method, applied.places)
        for stage_run in self.stages:
            self._write_program(stage_run)

    def _write_program(self, stage: StageRun) -> None:
        handlers = self._handlers(stage)
        if self.work.observers or profiler._is_profiler_enabled:
            from .observer import with_observers

            handlers = with_observers(self.work.observers, stage, handlers)
        announce = self.processes.announce(self, stage.stage)
        if announce is not None:
            handlers = {kind: chained(partial(announce, kind), handlers[kind]) for kind in handlers}
        # An update runs at once after the instruction before it; so does, in an evaluation, the
        # notice that a batch is finished.
        joined = (Kind.UPDATE,) if self.trains else (Kind.UPDATE, Kind.BACKWARD)
        stage.write_program(
            handlers=handlers,
            inputs=self._inputs(stage),
            joined=joined if self._order is None else (),
            blocks=self.processes.receives_block,
        )

    def _handlers(self, stage: StageRun) -> dict[Kind, Handler]:
        """Return the handlers of a stage's steps."""
        steps: dict[Kind, Handler] = {}
        source = self.wires.source
        if source is not None and stage is self.stages[0]:
            steps[Kind.PULL] = source.pull
        if self.losses is not None and stage is self.stages[-1]:
            steps[Kind.LOSS] = self.losses.loss
        elif stage.edges.targets:
            steps[Kind.MEASURE] = measuring(stage, self.work.call)
        ties = self.wires.tie_ends_at(stage.stage.index) if self.trains else ()
        of_ties = [end.handlers() for end in ties]
        return stage.handlers(steps, *of_ties, self.processes.handlers(self, stage))

    def _inputs(self, stage: StageRun) -> Iterator[dict[Kind, Sized]]:
        """Yield, for each microbatch, the inputs of its steps: empty until they have arrived."""
        level = _Level(self, stage.cursor)
        for inputs in self.wires.inputs(stage.stage.index):
            if self.trains:
                inputs[Kind.UPDATE] = level
            if self._norm is not None:
                inputs[Kind.CLIP] = inputs[Kind.AGREE] = self._norm
            yield inputs

    # The loop. Stage k of N runs a compute instruction once its input has arrived, then stage k + 1
    # runs one, and so on, until all have finished. For a 1F1B schedule (F: forward, B: backward and
    # the update that may follow; the number is the minibatch) this gives
    #
    # stage 0   F0 F1 F2 B0 F3 B1 F4 B2 ...
    # stage 1      F0 F1 B0 F2 B1 F3 B2 ...
    # stage 2         F0 B0 F1 B1 F2 B2 ...
    #
    # Each of these consists of steps, see ``schedule/lowering.py``; F3 on stage 1, for example:
    # receive activation, load forward weights, forward, send activation.

    def _loop(self) -> Iterator[Result]:
        """Advance all stages by turns until all have finished; yield the results."""
        stages, results = self.stages, self.results
        if self._order is not None:
            for _ in self._in_order(self._order):
                yield from self._finished()
            stages = []
        while stages:
            progress = finished = False
            for stage in stages:
                progress |= stage.advance()
                finished |= stage.cursor.finished
                if results or stage.cursor.updated > self.updated:
                    yield from self._finished()
            if finished:
                stages = [stage for stage in stages if not stage.cursor.finished]
            if stages and not progress:
                raise _stuck(stages)
        self.processes.close(self)

    def _finished(self) -> Iterator[Result]:
        """Yield the results of minibatches that all stages of this process have updated from.

        None of them has made a later update, so the caller sees one version of the model. Not when
        their losses are known: rank 0 of several processes learns that later. So the caller leaves
        a run after as many minibatches in any number of processes.
        """
        computed, waiting = self.results, self._waiting
        while computed:
            waiting.append(computed.popleft())
            if self.losses is not None:
                self.losses.deliver(waiting[-1])
            for observer in self.work.observers:
                observer.result(waiting[-1])
        self.updated = min([stage.cursor.updated for stage in self.stages])
        while waiting and waiting[0].index < self.updated:
            yield waiting.popleft()

    def _in_order(self, order: Iterator[tuple[int, Instruction]]) -> Iterator[None]:
        """Run instructions in a given order, which may be longer than the run; yield after each."""
        by_index = {stage.stage.index: stage for stage in self.stages}
        # Their updates wait for a later instruction: for the gradient norm of another stage.
        late: list[StageRun] = []
        while any(stage.upcoming() for stage in self.stages):
            k, instruction = next(order)
            if by_index[k].waits:
                raise _stuck([by_index[k]])
            if by_index[k].upcoming() == instruction:  # otherwise the run does not contain it
                late.append(by_index[k])
            for stage in late:
                stage.advance()
            late = [stage for stage in late if stage.waits]
            yield

    def _leave(self) -> None:
        """Begin no further minibatch, since the caller has left the run."""
        if self.wires.source is not None:
            self.wires.source.leave()

    # What the caller does between two results.

    @property
    def is_looked_at(self) -> bool:
        """Whether the caller looks at the true weights, inside ``Pipeline.weights``."""
        return self._end_look is not None

    def begin_look(self, end: Callable[[], None]) -> None:
        self._end_look = end

    def end_look(self) -> None:
        """End the caller's look at the true weights, if it has not ended."""
        with deferred():
            if self._end_look is not None:
                self._end_look()
                self._end_look = None

    def _take_back(self) -> None:
        """Take gradients and optimizers back from the caller, who may have moved parameters."""
        self.end_look()
        for stage in self.wires.stages:
            stage.take_back()

    # Its end.

    def finish_interrupted(self) -> None:
        """End a run whose end was cut short, for example by a second Ctrl-C."""
        if self._open and not self.running:
            self._fail()

    def _fail(self) -> None:
        with deferred():
            make_all((self._abandon, self._end))

    def _end(self) -> None:
        """Put the true weights back and let the caller's streams follow; may be repeated."""
        self._begun = self.begun
        ends = [self.end_look, *(stage.end for stage in self.stages)]
        if self.trains:
            ends += [stage.let_go_of_weights for stage in self.wires.stages]
        ends += [self.processes.end, *(end.end for end in self.wires.tie_ends)]
        make_all((*ends, self.wires.let_caller_follow))
        self._open, self.stages, self.losses = False, [], None

    def _abandon(self) -> None:
        """Wait for all streams after a failure, and forget what was in flight."""
        streams = list(self.wires.streams())
        for stream in streams:
            stream.leave()
        waits = (stream.synchronize for stream in streams)
        resets = (edge.reset for edge in self.wires.local_edges)
        # Try everything: on a device that has failed none of it succeeds. At the end, follow the
        # caller, who may have used the weights since.
        make_all((*waits, *resets, self.wires.follow_caller))

    def close(self) -> None:
        """Finish what is in flight, unless other processes have a part in it."""
        generator = None if self._generator is None else self._generator()
        if generator is not None and not self.wires.remote:  # other ranks may be gone
            generator.close()


def _stuck(stages: Iterable[StageRun]) -> RuntimeError:
    heads = ", ".join(f"stage {each.stage.index} at {each.upcoming()}" for each in stages)
    return RuntimeError(f"no stage can go on: {heads}")


@atexit.register
def _close_runs() -> None:
    """Close runs first: torch aborts a process that ends with graphs of a suspended run."""
    for run in list(_made):
        run.close()
