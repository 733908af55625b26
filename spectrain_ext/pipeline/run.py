"""One run of the stages of a process: what each does in which order, and the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.autograd import profiler

from spectrain_ext.errors import RankError, StageError
from spectrain_ext.interrupts import STATE, boundary
from spectrain_ext.schedule import Instruction, Kind, find_generator, flushes, steps
from spectrain_ext.schedule.lowering import ORDER

from .compute import Mode
from .cursor import Cursor
from .losses import Keep, Losses, Result, measuring
from .norms import GlobalNorm
from .passes import Handler, chained, hooks
from .processes import Processes
from .stage import Stage
from .stage_run import StageRun
from .wires import Wires

if TYPE_CHECKING:
    from .observer import Observer


class Work(NamedTuple):
    """What a run does."""

    mode: Mode
    call: Callable[..., Any]  # the loss function; in an evaluation, what measures
    counted: bool = False  # whether ``count`` gives the divisors of the losses in advance
    minibatches: int = 0  # of training, before the run
    done: int = 0  # those of them under the same method
    keep: Keep | None = None
    observers: Sequence[Observer] = ()


class _Step(NamedTuple):
    """One step of an instruction, and the handler that runs it."""

    kind: Kind
    input: Sized | None  # empty until it has arrived; None: it has none, or blocks
    run: Handler


class _Level(Sized):
    """An input of updates, empty while the stage is an update ahead of another one here."""

    def __init__(self, run: Run, cursor: Cursor) -> None:
        self._run, self._cursor = run, cursor

    def __len__(self) -> int:
        return self._cursor.updated <= self._run.updated


class _Program:
    """The steps of each compute instruction of a stage."""

    def __init__(self, run: Run, stage: StageRun) -> None:
        self.stage, self.cursor = stage.stage, stage.cursor
        handlers = run.handlers(stage)
        if run.work.observers or profiler._is_profiler_enabled:
            from .observer import with_observers

            handlers = with_observers(run.work.observers, stage, handlers)
        announce = run.processes.announce(run, stage.stage)
        if announce is not None:
            handlers = {kind: chained(partial(announce, kind), handlers[kind]) for kind in handlers}
        # Compute instructions that run in the same turn as the one before them: an update, and in
        # an evaluation the notice that a batch is finished.
        self.takes: tuple[Kind, ...] = (Kind.UPDATE,)
        if not stage.trains:
            self.takes = Kind.UPDATE, Kind.BACKWARD
        blocks = run.processes.receives_block
        # By kind, for each microbatch.
        self.steps: dict[Kind, list[list[_Step]]] = {kind: [] for kind in ORDER}
        level = _Level(run, stage.cursor)
        for j, inputs in enumerate(run.inputs(stage)):
            if run.trains:
                inputs[Kind.UPDATE] = level
            for kind, of_microbatches in self.steps.items():
                kinds = steps(kind, handlers, blocks, first=j == 0)
                of_microbatches.append([_Step(k, inputs.get(k), handlers[k]) for k in kinds])


class Run:
    """One run: the stages' positions and programs, and the results. It ends with the run."""

    losses: Losses | None = None  # on the last stage, in a training

    def __init__(self, wires: Wires, processes: Processes, work: Work) -> None:
        self.wires, self.processes, self.work = wires, processes, work
        self.stages: list[StageRun] = []
        self.updated = 0  # minibatches that all stages of this process have updated from
        self.results: deque[Result] = deque()  # computed
        self._waiting: deque[Result] = deque()  # for updates
        self._norm: GlobalNorm | None = None
        self._order: Iterator[tuple[int, Instruction]] | None = None

    @property
    def trains(self) -> bool:
        return self.work.mode is Mode.TRAIN

    @property
    def begun(self) -> int:
        """How many minibatches have begun."""
        return self.stages[0].cursor.added if self.stages else 0

    def begin(self, stages: Sequence[Stage], batches: Iterator[object]) -> None:
        work, wires, processes = self.work, self.wires, self.processes
        applied, tells = wires.applied, bool(hooks(stages[0].passes, "tells"))
        schedule = find_generator(applied.method.schedule)
        if self.trains and (applied.globally or (tells and flushes(applied.method.schedule))):
            self._norm = processes.norm()
        for stage in stages:
            place = applied.places[stage.index]
            cursor = Cursor(schedule(place), place.microbatches)
            edges = wires.edges[stage.index]
            run = StageRun(stage, cursor, edges, work.mode, applied, *work[3:5], self._norm)
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
                counted=work.counted,
                held=held,
            )
        self._order = processes.order(schedule, applied.places)
        wires.begin()
        processes.begin(self)
        if wires.source is not None:
            wires.source.begin(batches, self.stages[0].compute.pass_on_end)
        for end in wires.tie_ends if self.trains else ():
            end.begin(applied.method, applied.places)

    def handlers(self, stage: StageRun) -> dict[Kind, Handler]:
        """Return what a stage does: its instructions consist of these steps."""
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

    def inputs(self, stage: StageRun) -> Iterator[dict[Kind, Sized]]:
        """Yield what its steps wait for, for each microbatch: empty until it has arrived."""
        for inputs in self.wires.inputs(stage.stage.index):
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

    def loop(self) -> Iterator[Result]:
        """Run all stages in turn until all have finished; yield the results."""
        # Made here: if kept, these methods would form a cycle that holds all buffers until the
        # next garbage collection.
        programs = [_Program(self, stage) for stage in self.stages]
        if self._order is not None:
            for program in programs:
                program.takes = ()
            for _ in self._in_order(self._order, programs):
                yield from self._finished()
            programs = []
        results = self.results
        while programs:
            progress = finished = False
            for program in programs:
                progress |= _turn(program)
                finished |= program.cursor.finished
                if results or program.cursor.updated > self.updated:
                    yield from self._finished()
            if finished:
                programs = [each for each in programs if not each.cursor.finished]
            if programs and not progress:
                raise _stuck(programs)
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
            for observer in self.work.observers:
                observer.result(waiting[-1])
        self.updated = min([stage.cursor.updated for stage in self.stages])
        while waiting and waiting[0].index < self.updated:
            yield waiting.popleft()

    def _in_order(
        self, order: Iterator[tuple[int, Instruction]], programs: Sequence[_Program]
    ) -> Iterator[None]:
        """Run instructions in a given order, which may be longer than the run; yield after each."""
        of = {program.stage.index: program for program in programs}
        # Their updates wait for a later instruction: for the gradient norm of another stage.
        late: list[_Program] = []
        while any(p.cursor.current or p.cursor.peek() for p in programs):
            k, instruction = next(order)
            cursor = of[k].cursor
            if cursor.current is not None:
                raise _stuck([of[k]])
            if cursor.peek() == instruction:  # otherwise the run does not contain it
                cursor.take()
                late.append(of[k])
            for program in late:
                _turn(program)
            late = [program for program in late if program.cursor.current is not None]
            yield

    def leave(self) -> None:
        """Begin no further minibatch, since the caller has left the run."""
        if self.wires.source is not None:
            self.wires.source.leave()


def _turn(program: _Program) -> bool:
    """Run a stage's instruction, and those of the same turn, until one has to wait."""
    cursor, progress = program.cursor, False
    while cursor.current is not None or cursor.take() is not None:
        assert cursor.current is not None
        computes, i, j = cursor.current
        steps = program.steps[computes][j]
        for step in range(cursor.step, len(steps)):
            kind, waits_for, run = steps[step]
            if waits_for is not None and not waits_for:
                cursor.step = step
                return progress
            if STATE.pending is not None:
                boundary()
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
            cursor.updated = i + 1
        following = cursor.upcoming
        if following is None or following[0] not in program.takes:
            break
    return progress


def _stuck(programs: Iterable[_Program]) -> RuntimeError:
    cursors = [(p.stage.index, p.cursor) for p in programs]
    heads = ", ".join(f"stage {k} at {c.current or c.peek()}" for k, c in cursors)
    return RuntimeError(f"no stage can go on: {heads}")
