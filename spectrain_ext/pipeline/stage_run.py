"""Defines ``StageRun``: one stage in one run, with its program and all that is half done."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import NamedTuple

from torch import Tensor

from spectrain_ext.errors import RankError, StageError
from spectrain_ext.interrupts import STATE, boundary
from spectrain_ext.method import factor_of
from spectrain_ext.schedule import Instruction, Kind, steps
from spectrain_ext.schedule.lowering import ORDER
from spectrain_ext.transport import Buffer

from .applied_method import AppliedMethod
from .compute import Compute, Mode, StageEdges
from .cursor import Cursor
from .loads import Loads
from .norms import Clipping, GlobalNorm
from .passes import Handler, chained, handlers_of
from .stage import Stage
from .updates import Updates


class _Step(NamedTuple):
    """One step of an instruction, and the handler that runs it."""

    kind: Kind
    input: Sized | None  # empty until it has arrived; None: it has none, or blocks
    run: Handler


class StageRun:
    """One stage in one run. It ends with the run, and what is in flight with it.

    Three objects do its work: ``Loads`` selects weights, ``Compute`` receives, computes and sends,
    ``Updates`` changes the weights.

    Attributes:
        stage: the stage.
        cursor: its position in the schedule.
        edges: its edges in this run.
        compute: what receives, computes and sends.
        trains: whether this is a training.
        norm: exchanges a number and the gradient norm between all stages; None: not needed.
    """

    def __init__(
        self,
        stage: Stage,
        cursor: Cursor,
        edges: StageEdges,
        mode: Mode,
        applied: AppliedMethod,
        minibatches: int = 0,  # of training, before this run
        done: int = 0,  # those of them under this method
        norm: GlobalNorm | None = None,
    ) -> None:
        self.stage, self.cursor, self.edges, self.norm = stage, cursor, edges, norm
        self.trains, self._before = mode is Mode.TRAIN, minibatches
        self._updates: Updates | None = None
        if self.trains:
            clipping = Clipping(applied.max_norms[stage.index], applied.globally)
            self._updates = Updates(stage, cursor, clipping, norm)
            self._factor = factor_of(applied.method, applied.places[stage.index], done)
        self.compute = Compute(stage, cursor, edges, mode, self._updates)
        self._handlers: list[Mapping[Kind, Handler]] = []  # of the stage itself
        self._of_passes: list[Mapping[Kind, Handler]] = []
        self._program: dict[Kind, list[list[_Step]]] = {}  # by instruction, for each microbatch
        self._joined: Sequence[Kind] = ()  # see ``write_program``
        # An instruction that waits for an input, and at which of its steps.
        self._waiting: tuple[Instruction, int] | None = None

    def begin(self) -> None:
        """Take the weights; whatever happens, ``end`` and the stage put all back."""
        stage, updates = self.stage, self._updates
        if updates is not None:
            stage.hold_weights(self._factor)
            self._handlers.append(updates.handlers())
            weights, storage = stage.weights, stage.storage
            if weights is not None and storage is not None:
                # On the CPU nothing needs to wait for the update that has written the weights.
                idle = stage.immediate and weights.versions.loads_nothing
                self._handlers += [] if idle else [Loads(stage, weights, storage).handlers()]
        of_passes = [handlers_of(each, self) for each in stage.passes]
        self.compute.begin()
        self._handlers.append(self.compute.handlers())
        self._of_passes = of_passes if self.trains else []

    def handlers(self, *others: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        """Return what runs each step: the stage, ``others``, and then the passes."""
        handlers: dict[Kind, Handler] = {}
        for more in (*self._handlers, *others, *self._of_passes):
            for kind, handler in more.items():
                earlier = handlers.get(kind)
                handlers[kind] = handler if earlier is None else chained(earlier, handler)
        return handlers

    def write_program(
        self,
        handlers: Mapping[Kind, Handler],
        inputs: Iterable[Mapping[Kind, Sized]],  # of the steps, for each microbatch
        joined: Sequence[Kind],
        blocks: bool,
    ) -> None:
        """List the steps of each instruction.

        ``joined`` instructions run at once after the one before them. ``blocks``: a receive blocks,
        so that a stage loads weights first.
        """
        self._joined = joined
        self._program = {kind: [] for kind in ORDER}
        for j, of_steps in enumerate(inputs):
            for kind, of_microbatches in self._program.items():
                kinds = steps(kind, handlers, blocks, first=j == 0)
                of_microbatches.append([_Step(k, of_steps.get(k), handlers[k]) for k in kinds])

    def advance(self) -> bool:
        """Run the next instruction and joined ones until one waits; return whether a step ran."""
        cursor, progress, entered = self.cursor, False, False
        stream = None if self.stage.immediate else self.stage.compute
        try:
            while True:
                if self._waiting is not None:
                    taken, first = self._waiting
                elif (next_one := cursor.take()) is not None:
                    taken, first = next_one, 0
                else:
                    break
                computes, i, j = taken
                of_instruction = self._program[computes][j]
                for number in range(first, len(of_instruction)):
                    kind, waits_for, run = of_instruction[number]
                    if waits_for is not None and not waits_for:
                        self._waiting = taken, number
                        return progress
                    if STATE.pending is not None:
                        boundary()
                    # Enter the stream once for all steps, but not for the caller's own code.
                    if stream is not None and not entered and kind is not Kind.PULL:
                        stream.__enter__()
                        entered = True
                    try:
                        run(i, j)
                    except RankError:
                        raise
                    except Exception as error:
                        if kind is Kind.PULL:  # the caller's own iterator, or a bad batch from it
                            raise
                        raise self._failure(error, kind, i) from error
                    progress = True
                    if cursor.minibatches is not None and i >= cursor.minibatches:
                        break  # the stage has learned that the run ended before this
                self._waiting, progress = None, True
                if computes is Kind.UPDATE:
                    cursor.end_minibatch(i)
                following = cursor.upcoming
                if following is None or following[0] not in self._joined:
                    break
        finally:
            if entered and stream is not None:
                stream.__exit__(*sys.exc_info())
        return progress

    def _failure(self, error: Exception, kind: Kind, i: int) -> StageError:
        notes = getattr(error, "__notes__", ())
        reason = "; ".join((f"{type(error).__name__}: {error}", *notes))
        return StageError(self.stage.index, i, kind.value, reason)

    @property
    def waits(self) -> bool:
        """Whether an instruction that has begun waits for an input."""
        return self._waiting is not None

    def upcoming(self) -> Instruction | None:
        """Return the instruction that waits or comes next, as far as is known now."""
        return self.cursor.peek() if self._waiting is None else self._waiting[0]

    def end(self) -> None:
        """Put back what the run has changed, and free what it holds; may be repeated."""
        self.compute.end()
        # Handlers hold this object.
        self._program, self._handlers, self._of_passes = {}, [], []

    # For passes and observers.

    @property
    def is_first(self) -> bool:
        return not self.edges.to_previous

    @property
    def is_last(self) -> bool:
        return bool(self.edges.targets)

    def microbatches_of(self, i: int) -> int:
        return len(self.cursor.shares[i])

    def microbatch_of(self, j: int) -> int:
        return self.edges.replica + j * self.edges.count

    def input_gradients(self) -> tuple[list[Tensor], Buffer]:
        return self.compute.input_gradients()

    @property
    def divisor(self) -> Tensor | None:
        """The divisor of the loss of the minibatch that is being finished; None: it is a mean."""
        return None if self._updates is None else self._updates.divisor

    def count_of(self, i: int) -> Tensor | None:
        """Return the count so far of a minibatch whose loss is a sum, None for a mean."""
        return None if self._updates is None else self._updates.divisors.get(i)

    def number_of(self, i: int) -> int:
        """Return a minibatch's number in all runs, without those of which nothing remained."""
        return i + self._before - self.stage.undone if self.trains else i
