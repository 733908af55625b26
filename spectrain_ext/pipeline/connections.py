"""Connections: what joins the stages of a process to one another and to the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spectrain_ext.method import Method, phases_of, put_off_by
from spectrain_ext.schedule import Duties, Generator, Instruction, Kind, Place, Replicas
from spectrain_ext.transport import Edge, Receiver

from .averaging import Averaged
from .batch import SplitDim
from .clipping import GlobalNorm
from .edges import Source, StageEdges
from .loads import Handler
from .losses import Keep, Losses, LossFn, Result
from .stage import Mode, Stage
from .tie_ends import Ties, depth_of
from .ties import Copy, ties_of

#: Whether what an instruction waits for has come; it changes nothing.
Ready = Callable[[int, int], bool]
#: Takes the output and the target of every batch of an evaluation.
Measure = Callable[[Any, Any], object]


class Connections:
    """The edges between stages, what stages put together, and the results for the caller.

    Here all stages of a pipeline are in one process; a rank of several connects its own otherwise.

    Args:
        stages: how many there are in the pipeline.
        split_dim: along which dimensions minibatches are cut.

    Attributes:
        indices: of the stages of this process.
        replicas: of all stages.
        split_dim: as given.
        norm: where stages put their gradients' norms together in phases that clip by all stages'
            norm; None: there is no such phase.
        loss_fn: what the last stage computes losses with.
        results: that wait for the caller.
        averaged: what averages the weights of stages of this process with those of replicas.
        edges: of every stage, for training.
        measure: of the evaluation that goes on.
    """

    loss_fn: LossFn
    edges: dict[int, StageEdges]
    measure: Measure
    _source: Source | None
    _losses: Losses | None
    _ties: Ties
    _local: list[Edge]

    def __init__(self, stages: int, split_dim: SplitDim = 0) -> None:
        self.indices: Sequence[int] = range(stages)
        self.replicas = Replicas((1,) * stages)
        self.split_dim = split_dim
        self.averaged: Mapping[int, Averaged] = {}
        self.norm: GlobalNorm | None = GlobalNorm(stages)
        self.results: deque[Result] = deque()
        self.mode = Mode.TRAIN

    def connect(
        self,
        stages: list[Stage],
        places: list[Place],
        method: Method,
        loss_fn: LossFn,
        copies: Sequence[Copy],
    ) -> None:
        """Give the stages of this process their edges.

        Args:
            stages: of this process.
            places: of all stages, with the largest window that each will have.
            method: what they train by, with all of its phases.
            loss_fn: of the last stage.
            copies: the parameters that stages of this process have from others.
        """
        self._stages = stages
        self.loss_fn = loss_fn
        later = put_off_by(method, places)
        self._wire(places[0].microbatches, [place.window for place in places], later)
        self._losses = Losses(stages[-1], loss_fn, len(places), self.results)
        ties = ties_of(each.member for each in copies)
        here = {stage.index: stage for stage in stages}
        counted = any(phase.forward_horizon == "counted" for phase in phases_of(method))
        self._ties = Ties(
            *(ties, copies, here),
            depth=lambda tie: depth_of(places[tie.home], later[tie.copy], counted),
            remote=lambda n: (None, None),
        )

    def _wire(
        self,
        microbatches: int,
        windows: Sequence[int],
        later: Sequence[int],
        slots: int | None = None,
    ) -> None:
        """Make the edges: batch -> stage 0, neighbours in both directions, batch -> loss.

        A ring has one slot more than its sender may have microbatches in flight, or as many more as
        the receiver puts off its weights' halves of backwards. By the time a slot is written again,
        the sender has then heard of the end of the backward that read it, and whatever that
        backward passed on in the same memory has been copied. A batch comes in as a whole: there
        its other microbatches have slots as well. Where stages only go forward, two ``slots`` are
        enough: what a stage works on, and what comes.
        """
        stages, self._local = self._stages, []

        def edge(a: Stage | None, b: Stage, name: str, depth: int) -> list[Edge]:
            made = Edge(name, None if a is None else a.device, b.device, b.compute, depth)
            self._local.append(made)
            return [made] * microbatches

        self.edges = {stage.index: StageEdges(split_dim=self.split_dim) for stage in stages}
        inputs = edge(None, stages[0], "edge batch -> 0", slots or windows[0] + microbatches)
        depth = slots or targets_depth(windows[0], microbatches, later[-1])
        targets = edge(None, stages[-1], "edge batch -> loss", depth)
        self.edges[0].inputs = inputs
        self.edges[len(stages) - 1].targets = targets
        for a, b, window in zip(stages, stages[1:], windows, strict=False):
            one, other = self.edges[a.index], self.edges[b.index]
            name = f"edge {a.index} -> {b.index}"
            one.to_next = other.inputs = edge(a, b, name, slots or window + later[b.index])
            name = f"edge {b.index} -> {a.index}"
            other.to_previous = one.gradients = edge(b, a, name, window + 1)
        pairs = list(zip(inputs, targets, strict=True))
        self._source = Source(pairs, self.replicas, self.split_dim, self.evaluates)

    @property
    def evaluates(self) -> bool:
        """Whether the stages only go forward."""
        return self.mode is not Mode.TRAIN

    def change(self, method: Method, places: list[Place]) -> None:
        """From the next run on all stages train by this phase, at these places."""
        self._ties.change(method, places)

    def evaluating(self, places: list[Place]) -> Connections:
        """What joins the same stages in evaluations: edges of their own, for batches of any size.

        Args:
            places: of all stages; the parts of a minibatch there are whole batches.
        """
        made = Connections(len(self._stages), self.split_dim)
        made._begin_evaluating(self)
        made._wire(1, [place.window for place in places], [1] * len(places), slots=2)
        return made

    def _begin_evaluating(self, training: Connections) -> None:
        self.mode, self._stages = Mode.EVALUATE, training._stages
        self.norm, self._losses = None, None
        self._ties = Ties((), (), {}, lambda tie: 0, lambda n: (None, None))

    def receivers(self) -> Iterable[Receiver]:
        """All edges that end in this process."""
        return (*self._local, *self._ties.edges)

    # What a stage does in a run.

    def duties(self, stage: Stage) -> Duties:
        """What it does beside its schedule."""
        k = stage.index
        return Duties(
            evaluates=self.evaluates,
            recomputes=stage.recomputes,
            lends=self._ties.lends(k),
            borrows=self._ties.borrows(k),
            clips=stage.max_norm is not None,
            tells_norm=stage.global_norm is not None,
            averages=k in self.averaged,
        )

    def handlers(self, stage: Stage) -> dict[Kind, Handler]:
        """What runs its instructions."""
        found = {**stage.handlers(), **self._ties.handlers(stage.index)}
        if self._source is not None:
            found[Kind.PULL] = self._source.pull
        if self._losses is not None:
            found[Kind.LOSS] = self._losses.loss
        if self.evaluates:
            found[Kind.MEASURE] = lambda i, j: stage.measure(i, j, self.measure)
        averaged = self.averaged.get(stage.index)
        if averaged is not None:
            found[Kind.SEND_WEIGHTS], found[Kind.AVERAGE] = averaged.send, averaged.average_in
        return found

    def ready(self, stage: Stage) -> dict[Kind, Ready]:
        """What its instructions wait for; those that are left out wait for nothing, or block."""
        edges, k, found = self.edges[stage.index], stage.index, {}
        for kind, receivers in (
            (Kind.RECEIVE_ACTIVATION, edges.inputs),
            (Kind.RECEIVE_GRADIENT, edges.gradients),
            (Kind.RECEIVE_WORD, edges.gradients),
        ):
            if receivers and not receivers[0].blocks:
                found[kind] = _has(receivers)
        if self._ties.lends(k):
            found[Kind.ADD_TIED_GRADIENTS] = lambda i, j: self._ties.gradients_are_there(k)
        if stage.global_norm is not None:
            norm = stage.global_norm
            found[Kind.CLIP] = lambda i, j: norm.complete(i)
        return found

    def announce(self, stage: Stage) -> Callable[[Kind, int, int], None] | None:
        """Is told each instruction that begins; None: nobody is."""
        return None

    # A run.

    def run(self) -> AbstractContextManager[None]:
        """Inside, a run takes place."""
        return nullcontext()

    def order(
        self, schedule: Generator, places: list[Place]
    ) -> Iterator[tuple[int, Instruction]] | None:
        """Which stage computes what in a run, one after another, without an end.

        None: the stages take turns, each as far as what it waits for has come.

        Args:
            schedule: the order of every stage's own instructions.
            places: of all stages.
        """
        return None

    def begin(self, batches: Iterator[object], keep: Keep | None = None) -> None:
        """The stages have begun a run."""
        for edges in self.edges.values():
            edges.heard_end = None
        for edge in (*self._local, *self._ties.edges):
            edge.begin()
        if self._source is not None:
            self._source.begin(batches, self._stages[0].hear_end)
        if self._losses is not None:
            self._losses.begin(keep)
        if not self.evaluates:
            self._ties.begin()
        for averaged in self.averaged.values():
            averaged.begin()

    def yields(self, result: Result) -> None:
        """The caller gets a result."""

    def leave(self) -> None:
        """The caller has left the run: begin no minibatch that has not begun."""
        if self._source is not None:
            self._source.left = True

    def close(self) -> None:
        """The stages have finished their instructions."""

    def end(self) -> None:
        """Forget the run; may be repeated."""
        if self.norm is not None:
            self.norm.reset()
        self.results.clear()
        if self._losses is not None:
            self._losses.end()
        self._ties.end()


def targets_depth(window: int, microbatches: int, later: int) -> int:
    """Minibatches whose targets may be under way or in use at once.

    From their pull to the end of the last stage's last backward stage 0 has as many microbatches in
    flight as its window, besides those by which the last stage puts its weights' halves off.
    """
    return -(-(window + later - 1) // microbatches) + 1


def _has(receivers: Sequence[Receiver]) -> Ready:
    only = receivers[0]
    if all(each is only for each in receivers):
        return only.has
    return lambda i, j: receivers[j].has(i, j)
