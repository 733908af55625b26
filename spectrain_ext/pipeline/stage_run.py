"""Defines ``StageRun``: one stage in one run, with all that is half done."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spectrain_ext.method import factor_of
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import Buffer

from .compute import Compute, Mode, StageEdges
from .course import AppliedMethod
from .cursor import Cursor
from .loads import Loads
from .norms import Clipping, GlobalNorm
from .passes import Handler, chained, handlers_of
from .stage import Stage
from .updates import Updates


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
        self._steps: list[Mapping[Kind, Handler]] = []
        self._of_passes: list[Mapping[Kind, Handler]] = []

    def begin(self) -> None:
        """Take the weights; whatever happens, ``compute.end`` and the stage put all back."""
        stage, updates = self.stage, self._updates
        if updates is not None:
            stage.hold_weights(self._factor)
            self._steps.append(updates.handlers())
            weights, storage = stage.weights, stage.storage
            if weights is not None and storage is not None:
                # On the CPU nothing needs to wait for the update that has written the weights.
                idle = stage.immediate and weights.versions.loads_nothing
                self._steps += [] if idle else [Loads(stage, weights, storage).handlers()]
        of_passes = [handlers_of(each, self) for each in stage.passes]
        self.compute.begin()
        self._steps.append(self.compute.handlers())
        self._of_passes = of_passes if self.trains else []

    def handlers(self, *others: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        """Return what runs each step: the stage, ``others``, and then the passes."""
        handlers: dict[Kind, Handler] = {}
        for steps in (*self._steps, *others, *self._of_passes):
            for kind, step in steps.items():
                before = handlers.get(kind)
                handlers[kind] = step if before is None else chained(before, step)
        return handlers

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
        """What the loss of the minibatch that is being finished is divided by; None: a mean."""
        return None if self._updates is None else self._updates.divisor

    def count_of(self, i: int) -> Tensor | None:
        """Return the count so far of a minibatch whose loss is a sum, None for a mean."""
        return None if self._updates is None else self._updates.divisors.get(i)

    def number_of(self, i: int) -> int:
        """Return a minibatch's number in all runs, without those of which nothing remained."""
        return i + self._before - self.stage.undone if self.trains else i
