"""Defines ``Processes``: what a run asks of the processes that a pipeline spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

from torch import Tensor

from spectrain_ext.schedule import Generator, Instruction, Kind, Place, Replicas

from .applied_method import AppliedMethod
from .factories import check_hidden, hidden_use
from .losses import Result
from .norms import GlobalNorm
from .passes import Handler, Pass
from .stage import Stage
from .ties import Copy, TiedStages, ties_of


class Traffic(Enum):
    ACTIVATIONS = "activations"  # to the next stage
    GRADIENTS = "gradients"  # to the previous stage
    INPUTS = "inputs"  # of the caller's batches, to stage 0
    TARGETS = "targets"  # of the caller's batches, to the last stage
    TIED_WEIGHTS = "tied weights"  # to a stage that has copies of them
    TIED_GRADIENTS = "tied gradients"  # of tied weights, to the stage that owns them


TIED = (Traffic.TIED_WEIGHTS, Traffic.TIED_GRADIENTS)


#: An edge, by the replicas at both ends, numbered stage by stage; None: the caller's batches, or
#: the index of the rank that they go to among those that share the replica, if not the first. An
#: edge of tied parameters: None and the number of the tie.
Ends = tuple[Traffic, int | None, int]

#: How many messages of an edge may be under way or in use.
Depth = Callable[[Ends], int]


class Processes:
    """The processes that the pipeline spans, as runs see them: here, a single one.

    ``run``, ``stage`` and ``wires`` are a ``Run``, a ``StageRun`` and ``Wires``, whose files import
    this one.
    """

    replica = 0  # of its stages, the one that is here
    takes_batches = True  # whether the caller's batches come in at this process
    own_minibatches = False  # whether each replica trains on its own minibatches
    sharded = False  # whether parameters are DTensors
    # Several processes may share a stage by tensor parallelism: which this one is, and how many.
    shard = 0
    shards = 1
    passes: Sequence[Pass] = ()  # of every stage, before the caller's
    receives_block = False  # a stage then loads weights before it receives

    def __init__(self, replicas: Replicas, indices: Sequence[int]) -> None:
        self.replicas, self.indices = replicas, indices  # of all stages; the stages that are here

    def connect(
        self,
        stages: Sequence[Stage],
        methods: Sequence[AppliedMethod],  # of the training, one after another
        copies: Sequence[Copy],  # of other stages' weights, in these stages
        has_count: bool,  # whether ``count`` is given
    ) -> Sequence[TiedStages]:
        """Check what all processes must agree on; return all ties of the pipeline."""
        check_hidden([hidden_use(stage.weights for stage in stages)])
        return ties_of(each.member for each in copies)

    def remote_ends(
        self, stages: Mapping[int, Stage], depth: Depth, evaluates: bool
    ) -> dict[Ends, Any]:
        """Return new ends of the edges to other processes: senders and receivers."""
        return {}

    def norm(self) -> GlobalNorm:
        """Return what exchanges gradient norms in one run."""
        return GlobalNorm(self.replicas.stages)

    def largest(self, number: float) -> float:
        """Return the largest of the numbers that a stage's replicas give."""
        return number

    def exchange(self, message: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin to send a message to a stage's replicas; the call waits for theirs, in order."""
        raise NotImplementedError("no stage has replicas")

    # A run.

    def during(self, wires: Any) -> AbstractContextManager[None]:
        """Return a context for a run."""
        return nullcontext()

    def order(
        self, schedule: Generator, places: list[Place]
    ) -> Iterator[tuple[int, Instruction]] | None:
        """Return an endless order of the stages' instructions; None: the stages take turns."""
        return None

    def begin(self, run: Any) -> None:
        """Called when all stages have begun a run."""

    def handlers(self, run: Any, stage: Any) -> Mapping[Kind, Handler]:
        """Return what a stage does for other processes."""
        return {}

    def announce(self, run: Any, stage: Stage) -> Callable[[Kind, int, int], None] | None:
        """Return what is called with each step that begins."""
        return None

    def yields(self, result: Result) -> None:
        """Called before the caller gets a result."""

    def leaves(self, results: int, why: str) -> None:
        """Called when the caller has left its loop; ``why`` is empty if it has meant to."""

    def close(self, run: Any) -> None:
        """Called when the stages have finished their instructions."""

    def end(self) -> None:
        """Called when a run has ended or failed; may be repeated."""
