"""Runs the stages of a process: begins and ends runs, and orders them with the caller's work."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dis import get_instructions
from inspect import GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from types import FrameType
from weakref import WeakSet, ref

from spectrain_ext.errors import describe_error, make_all, noted_on
from spectrain_ext.interrupts import callers, deferred
from spectrain_ext.transport import Stream, callers_stream, captured

from .losses import Result
from .processes import Processes
from .run import Run, Work
from .stage import Stage
from .wires import Wires

_made: WeakSet[Executor] = WeakSet()  # of all pipelines

_PACKAGE = f"{__name__.partition('.')[0]}."
#: Python's instructions that take the iterator of a loop off the stack: at ``break`` or ``return``.
#: While an exception leaves a loop, its frame is still at the instruction that raised.
_LEAVING = frozenset(("POP_TOP", "POP_ITER", "END_FOR"))
#: Instructions between the name of a method without arguments and its call.
_CALLING = frozenset(("PRECALL", "CALL"))


class Executor:
    """The stages of this process and the wires between them: for trainings, or for evaluations."""

    def __init__(self, stages: Sequence[Stage], wires: Wires, processes: Processes) -> None:
        self.stages, self.wires, self.processes = stages, wires, processes
        self._results: ref[Generator[Result, None, None]] | None = None  # of the last run
        self._now: Run | None = None  # until it has ended
        self._begun = 0  # by the last run
        self.held: Callable[[], object] = lambda: None  # what ``Pipeline.run`` returned last
        self.keeping: keeping | None = None  # of the iterator that the caller has
        self._ignored: BaseException | None = None  # the last run's error: see ``keeping``
        self.look: Callable[[], None] | None = None  # ends the caller's look at the true weights
        _made.add(self)

    # A run.

    def run(self, batches: Iterator[object], work: Work) -> Generator[Result, None, None]:
        """Train on every batch; yield results in order, each after this process's last update."""
        self._begun = 0
        results = self._results_of(batches, work)
        self._results = ref(results)
        return results

    def _results_of(self, batches: Iterator[object], work: Work) -> Generator[Result, None, None]:
        handled = sys.exception()  # by the caller
        with deferred(), self.processes.during(self.wires):
            self._check()
            if self._captured():
                raise RuntimeError("run: a pipeline's run cannot become part of a CUDA graph")
            run = self._now = Run(self.wires, self.processes, work)
            try:
                self.follow_caller()
                run.begin(self.stages, batches)
                try:
                    for result in run.loop():
                        self.processes.yields(result)
                        for stage in self.stages:
                            stage.lend()
                        with callers():
                            yield result
                        self._take_back()
                except GeneratorExit as end:
                    self.processes.leaves(result.index + 1, self._note_way_out(end, handled))
                    run.leave()
                    self._take_back()
                    for _ in run.loop():
                        pass
                self._check()
                self._end(run)
            except BaseException as error:
                with noted_on(error):
                    self._fail(run)
                raise

    def _note_way_out(self, end: GeneratorExit, handled: BaseException | None) -> str:
        """Find how the caller has left the loop; return why, unless it has meant to."""
        frame = _callers_frame()
        instruction, before = ("", None) if frame is None else _at(frame)
        # A generator that is dropped loses its weak references first.
        closes = frame is None or (before == "close" and self.held() is not None)
        if self.keeping is not None:
            self.keeping.dropped = not closes
        error: BaseException | None = end
        while isinstance(error, GeneratorExit):  # those of generators around this one, too
            error = error.__context__
        if error is not None and error is not handled:
            return describe_error(error)
        if closes or instruction in _LEAVING:
            return ""
        return "an exception has ended the loop, or its iterator was dropped"

    def raise_ignored(self) -> None:
        """Raise, once, the error that came after the caller had left its loop."""
        error, self._ignored = self._ignored, None
        if error is not None:
            raise error

    @property
    def begun(self) -> int:
        """How many minibatches the last run has begun."""
        return self._begun if self._now is None else self._now.begun

    @property
    def running(self) -> bool:
        # Ask the generator: an exception could leave an attribute wrong.
        results = None if self._results is None else self._results()
        return results is not None and getgeneratorstate(results) in (GEN_RUNNING, GEN_SUSPENDED)

    def finish_interrupted(self) -> None:
        """End a run whose end was cut short, for example by a second Ctrl-C."""
        if self._now is not None and not self.running:
            self._fail(self._now)

    def _fail(self, run: Run) -> None:
        with deferred():
            make_all((self._abandon, lambda: self._end(run)))

    def _check(self) -> None:
        """Raise an error if a parameter has been moved or replaced since the stages were made."""
        for stage in self.stages:
            stage.check()

    def _take_back(self) -> None:
        """Take gradients and optimizers back from the caller, who may have moved parameters."""
        self.end_look()
        for stage in self.stages:
            stage.take_back()

    def end_look(self) -> None:
        """End what ``Pipeline.weights`` has begun, if that has not ended."""
        with deferred():
            if self.look is not None:
                self.look()
                self.look = None

    def _end(self, run: Run) -> None:
        """Put the true weights back and let the caller's streams follow; may be repeated."""
        self._begun = run.begun
        ends = [self.end_look, *(stage.compute.end for stage in run.stages)]
        if run.trains:
            ends += [stage.let_go_of_weights for stage in self.stages]
        ends += [self.processes.end, *(end.end for end in self.wires.tie_ends)]
        make_all((*ends, self.let_caller_follow))
        self._now = None

    def _abandon(self) -> None:
        """After a failure: wait for all streams, and forget what was in flight."""
        streams = list(self._streams())
        for stream in streams:
            stream.leave()
        waits = (stream.synchronize for stream in streams)
        resets = (edge.reset for edge in self.wires.local_edges)
        # Try everything: on a device that has failed none of it succeeds. At the end, follow the
        # caller, who may have used the weights since.
        make_all((*waits, *resets, self.follow_caller))

    def _streams(self) -> Iterator[Stream]:
        for stage in self.stages:
            yield stage.compute
            yield stage.predict
        for edge in self.wires.receivers():
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


class keeping:
    """Around all that the caller's iterator does: keeps an error that the program does not get.

    After ``break``, or while an exception leaves the loop, Python prints what a generator raises
    and goes on ("Exception ignored").
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self._is_outermost = executor, executor.keeping is None
        self.dropped = False  # the iterator, instead of closed by a call

    def __enter__(self) -> None:
        if self._is_outermost:
            self._executor.keeping = self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._is_outermost:
            self._executor.keeping = None
            if self.dropped and error is not None and not isinstance(error, GeneratorExit):
                error.add_note("after the loop was left; the next use of the pipeline raises it")
                self._executor._ignored = error


def _callers_frame() -> FrameType | None:
    """Return the innermost frame outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def _at(frame: FrameType) -> tuple[str, object]:
    """Return the name of the instruction that a frame runs; and, if it calls, what is called."""
    name, called = "", None
    for each in get_instructions(frame.f_code):
        if each.offset > frame.f_lasti:
            break
        name = each.opname
        if name not in _CALLING:
            called = each.argval
    return name, called if name in _CALLING else None


@atexit.register
def _close_runs() -> None:
    """Finish what is in flight: torch aborts a process that ends with graphs of a suspended run."""
    for executor in list(_made):
        results = None if executor._results is None else executor._results()
        if results is not None and not executor.wires.remote:  # other ranks may be gone
            results.close()
