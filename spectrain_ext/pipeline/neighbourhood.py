"""Neighbourhood: what is around the stages of a process, which is one another and the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from spectrain_ext.interrupts import callers
from spectrain_ext.method import Method, put_off_by
from spectrain_ext.schedule import Generator, Instruction, Kind, Place, Replicas
from spectrain_ext.transport import Buffer, Edge, Receiver

from .averaging import Averaged
from .batch import SplitDim, hand_in, split
from .clipping import GlobalNorm
from .cursor import Extent
from .losses import Keep, Losses, LossFn, Result
from .observer import Observer, watched
from .stage import Handler, Stage
from .tie_ends import LocalTies, tied
from .ties import Copy

Ready = Callable[[int, int], bool]
#: Of each kind of action: whether what it waits for has come, None: it waits for nothing; and what
#: runs it.
Work = dict[Kind, tuple[Ready | None, Handler]]


class Neighbourhood(Protocol):
    """What an executor is given: what its stages are connected to, and what an action waits for.

    Attributes:
        indices: of the stages of this process.
        seats: the replicas of all stages.
        norm: where stages put their gradients' norms together in phases that clip by all stages'
            norm; None: there is no such phase.
        split_dim: along which dimensions minibatches are cut.
        loss_fn: what the last stage computes losses with.
        results: that wait for the caller.
        averaged: what averages the weights of stages of this process with those of replicas.
    """

    indices: Sequence[int]
    seats: Replicas
    loss_fn: LossFn
    results: deque[Result]
    averaged: Mapping[int, Averaged]
    norm: GlobalNorm | None
    split_dim: SplitDim

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

    def change(self, method: Method, places: list[Place]) -> None:
        """From the next run on all stages train by this phase, at these places."""

    def evaluating(
        self, stages: list[Stage], places: list[Place], measure: LossFn
    ) -> Neighbourhood:
        """What is around stages that only go forward: edges of their own, batches of any size.

        Args:
            stages: of this process, for the time of an evaluation.
            places: of all stages; the parts of a minibatch there are whole batches.
            measure: is called in place of the loss function.
        """

    def edges(self) -> Iterable[Receiver]:
        """All edges that end in this process."""

    def run(self) -> AbstractContextManager[None]:
        """Inside, a run takes place."""

    def order(
        self, schedule: Generator, places: list[Place]
    ) -> Iterator[tuple[int, Instruction]] | None:
        """Whose turn it is in a run, one after another, as (stage, turn); without an end.

        None: the stages take turns, each as far as what it waits for has come.

        Args:
            schedule: the order of every stage's own actions.
            places: of all stages.
        """

    def begin(self, batches: Iterator[object], extent: Extent, keep: Keep | None = None) -> None:
        """The stages have begun a run."""

    def work_of(self, stage: Stage, trace: Observer | None) -> Work:
        """What a stage does in the run."""

    def leave(self) -> None:
        """The caller has left the run: begin no minibatch that has not begun."""

    def close(self) -> None:
        """The stages have finished their actions."""

    def end(self) -> None:
        """Forget the run; may be repeated."""


class LocalNeighbourhood:
    """All stages of a pipeline, in one process."""

    results: deque[Result]
    _slots: int | None = None  # of activations; None: as many as the window of backwards asks for

    def __init__(self, stages: int, split_dim: SplitDim = 0) -> None:
        self.indices: Sequence[int] = range(stages)
        self.seats = Replicas((1,) * stages)
        self.averaged: Mapping[int, Averaged] = {}
        self.norm: GlobalNorm | None = GlobalNorm(stages)
        self.split_dim = split_dim

    def connect(
        self,
        stages: list[Stage],
        places: list[Place],
        method: Method,
        loss_fn: LossFn,
        copies: Sequence[Copy],
    ) -> None:
        """Make the edges: batch -> stage 0, neighbours in both directions, batch -> loss.

        A ring has one slot more than its sender may have microbatches in flight, or as many more as
        the receiver puts off its weights' halves of backwards. By the time a slot is written again,
        the sender has then heard of the end of the backward that read it, and whatever that
        backward passed on in the same memory has been copied. A batch comes in as a whole: there
        its other microbatches have slots as well.
        """
        first, last = stages[0], stages[-1]
        self.loss_fn = loss_fn
        self._method = method
        self._microbatches = places[0].microbatches
        self._batch = Buffer("the caller's batch")
        self._losses = Losses(last, loss_fn, len(places))
        self.results = self._losses.results

        def edge(a: Stage | None, b: Stage, name: str, depth: int) -> Edge:
            made = Edge(name, None if a is None else a.device, b.device, b.compute, depth)
            self._edges.append(made)
            return made

        self._edges: list[Edge] = []
        later = put_off_by(method, places)
        depth = self._slots or places[0].window + self._microbatches
        first.inputs = self._inputs = edge(None, first, "edge batch -> 0", depth)
        last.targets = self._targets = edge(None, last, "edge batch -> loss", depth + later[-1] - 1)
        for a, b, place in zip(stages, stages[1:], places, strict=False):
            name = f"edge {a.index} -> {b.index}"
            a.to_next = b.inputs = edge(a, b, name, self._slots or place.window + later[b.index])
            back = place.window + 1
            b.to_previous = a.gradients = edge(b, a, f"edge {b.index} -> {a.index}", back)
        self._ties = LocalTies(copies, stages, places, later, method)
        self._edges += self._ties.edges

    def change(self, method: Method, places: list[Place]) -> None:
        self._ties.change(method, places)

    def evaluating(
        self, stages: list[Stage], places: list[Place], measure: LossFn
    ) -> Neighbourhood:
        made = LocalNeighbourhood(len(stages), self.split_dim)
        made._slots = 2
        made.connect(stages, places, self._method, measure, ())
        return made

    def edges(self) -> Iterable[Receiver]:
        return self._edges

    def run(self) -> AbstractContextManager[None]:
        return nullcontext()

    def order(self, schedule: Generator, places: list[Place]) -> None:
        return None

    def begin(self, batches: Iterator[object], extent: Extent, keep: Keep | None = None) -> None:
        self._batches, self._extent = batches, extent
        self._losses.begin(extent, keep)
        self._ties.begin(extent)
        for averaged in self.averaged.values():
            averaged.begin()

    def work_of(self, stage: Stage, trace: Observer | None) -> Work:
        handlers = {**stage.handlers(), Kind.PULL: self._pull, Kind.LOSS: self._losses.loss}
        ends = self._ties.ends.get(stage.index, ())
        handlers = tied(handlers, ends)
        if stage.index in self.averaged:
            handlers = self.averaged[stage.index].around(handlers)
        waits: dict[Kind, Ready] = {Kind.RECEIVE_ACTIVATION: stage.inputs.has}
        if stage.gradients is not None:
            waits[Kind.RECEIVE_GRADIENT] = stage.gradients.has
        norm = stage.global_norm
        if norm is not None or ends:

            def all_gave(i: int, j: int) -> bool:
                if not all(end.ready(i) for end in ends):
                    return False
                for end in ends:
                    end.before_update(i)
                if norm is None:
                    return True
                stage.give_norm(i)
                return norm.complete(i)

            waits[Kind.UPDATE] = all_gave
        found = watched(trace, stage, handlers)
        return {kind: (waits.get(kind), handler) for kind, handler in found.items()}

    def _pull(self, i: int, j: int) -> None:
        """Take the caller's next batch and make the run longer, or end it if there is none."""
        try:
            with callers():
                batch = next(self._batches)
        except StopIteration:
            self._extent.stop()
            return
        parts = split(batch, i, self._microbatches, self.split_dim)
        self._extent.add([part.share for part in parts])
        for part in parts:
            hand_in(self._inputs, part.input, self._batch)
            if part.target is part.input and self._inputs.target == self._targets.target:
                self._inputs.send_on(self._targets)
            else:
                hand_in(self._targets, part.target, self._batch)

    def leave(self) -> None:
        self._extent.stop()

    def close(self) -> None: ...

    def end(self) -> None:
        if self.norm is not None:
            self.norm.reset()
        self._losses.end()
        self._ties.end()
