"""DistributedNeighbourhood: what is around the stages of a rank whose neighbours are elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch.distributed as dist

from spectrain_ext.method import (
    Method,
    Window,
    check_replicas,
    phase_places,
    phases_of,
    put_off_by,
)
from spectrain_ext.operators.averaging import Averaging
from spectrain_ext.pipeline.arguments import check_order, cut_place
from spectrain_ext.pipeline.averaging import Averaged
from spectrain_ext.pipeline.batch import SplitDim
from spectrain_ext.pipeline.clipping import GlobalNorm
from spectrain_ext.pipeline.cursor import Extent
from spectrain_ext.pipeline.losses import Keep, LossFn, Result
from spectrain_ext.pipeline.neighbourhood import Work
from spectrain_ext.pipeline.observer import Observer
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.ties import Copy
from spectrain_ext.rng import StageRandom
from spectrain_ext.schedule import (
    Generator,
    Instruction,
    Place,
    Replicas,
    device_order,
    name_of,
)
from spectrain_ext.transport import Receiver

from .board import Board
from .collectives import DistributedNorm, GradientSum, WeightExchange
from .edges import Arrangement
from .equal_start import check_equal_start, resolved
from .links import backend_of_bodies, open_host_group, open_links
from .surroundings import Surroundings
from .ties import DistributedTies, agreed, said_of, seats_of


class DistributedNeighbourhood:
    """What one rank's stages are connected to: the ranks around it, their replicas, the caller.

    Rank 0 alone decides how long a run is. Each stage has ``Surroundings`` of its own; where there
    are several, they go through the run in an order that all ranks agree on, so that the rank may
    wait for what comes next.

    Args:
        group: the ranks, stage by stage; None: the default group.
        board: what the ranks know of each other.
        seats: the replicas of all stages, and the ranks that have them.
        dynamic_shapes: whether later messages may be larger than the first.
        share_loss: whether every rank gets the losses.
        clip_norm, clip_scope: what gradients are clipped to, and whose as one.
        averaging: replicas do not add up gradients, but average weights by this.
        split_dim: along which dimensions minibatches are cut.
        window: as the pipeline was given it.
    """

    averaged: Mapping[int, Averaged]
    results: deque[Result]
    loss_fn: LossFn

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        board: Board,
        seats: Replicas,
        dynamic_shapes: bool,
        share_loss: bool,
        clip_norm: float | None,
        clip_scope: str,
        averaging: Averaging | None = None,
        split_dim: SplitDim = 0,
        window: Window = None,
    ) -> None:
        self.split_dim = split_dim
        self.seats = seats
        self.indices: Sequence[int] = seats.stages_on(board.rank)
        self.replica = seats.seat(board.rank)[1]
        self._group, self._board = group, board
        self._settings = {
            "dynamic_shapes": dynamic_shapes,
            "share_loss": share_loss,
            "clip_scope": clip_scope,
            "averaging": repr(averaging),
            "split_dim": repr(split_dim),
        }
        self._averaging = averaging
        self.averaged = {}
        self.norm: GlobalNorm | None = DistributedNorm(seats, board)
        self._clip_norm, self._window = clip_norm, window

    def connect(
        self,
        stages: list[Stage],
        places: list[Place],
        method: Method,
        loss_fn: LossFn,
        copies: Sequence[Copy],
    ) -> None:
        """Meet the other ranks, and open the edges to some of them; every rank calls it."""
        board, seats, first = self._board, self.seats, stages[0]
        if len({stage.device for stage in stages}) > 1:
            where = ", ".join(str(stage.device) for stage in stages)
            raise ValueError(f"stage: the stages of a rank must be on one device, got {where}")
        self.loss_fn = loss_fn
        microbatches = places[0].microbatches * seats.counts[0]
        of_phases = phase_places(method, seats.stages, microbatches, self._window, seats)
        if self._averaging is None:
            check_replicas(method, of_phases, seats)
        found = board.meet(
            {
                "stage": f"{len(stages)} stages",
                "replicas": list(seats.counts),
                "method": method.name,
                "schedule": ", ".join(name_of(phase.schedule) for phase in phases_of(method)),
                "microbatches": microbatches,
                "window": [each.window for each in places],
                **resolved(method, of_phases),
                "device": first.device.type,
                "clip_norm": None if self.norm is None else self._clip_norm,
                **self._settings,
            },
            {**said_of(copies), "cut": [[s.index, cut_place(s.module)] for s in stages]},
        )
        _check_cut(found, seats)
        modules = {stage.index: stage.module for stage in stages}
        ties = agreed(board, seats, modules, copies, found)
        if seats.dealt:
            optimizer = None if first.weights is None else first.weights.optimizer
            check_equal_start(board, seats, first.module, optimizer)
            first.random = StageRandom(first.index, first.device, self.replica)
        bodies = backend_of_bodies(board, first.device)
        with board.run(starts=True):
            links = open_links(
                self._group,
                first.device,
                board,
                bool(self._settings["dynamic_shapes"]),
                seats,
                bodies,
                [seats_of(tie, seats) for tie in ties],
            )
            if isinstance(self.norm, DistributedNorm):
                self.norm.connect(open_host_group(self._group, board))
        total: GradientSum | None = None
        if links.circle is not None and self._averaging is not None:
            if first.weights is not None:
                exchange = WeightExchange(links.circle, board)
                self.averaged = {first.index: Averaged(first, self._averaging, exchange)}
        elif links.circle is not None:
            params = [] if first.weights is None else first.weights.params
            total = GradientSum(params, links.circle, board, first.compute, first.weight_gradients)
        self._tied = ties, copies
        arranged = Arrangement(
            places=places,
            split_dim=self.split_dim,
            later=put_off_by(method, places),
            seats=seats,
            links=links,
            board=board,
            apart=self._averaging is not None,
            share_loss=bool(self._settings["share_loss"]),
        )
        self._surround(stages, arranged, loss_fn, total)

    def _surround(
        self,
        stages: list[Stage],
        arranged: Arrangement,
        loss_fn: LossFn,
        total: GradientSum | None = None,
    ) -> None:
        """Make what the stages are connected to."""
        self._arranged = arranged
        # Results come from where a rank is done with a minibatch, or the loss is.
        reports = stages[-1] if stages[-1].index == len(arranged.places) - 1 else stages[0]
        self._around = [
            Surroundings(
                stage,
                arranged,
                loss_fn,
                total,
                self.averaged.get(stage.index),
                stage is stages[0],
                stage is reports,
                self._say_end,
            )
            for stage in stages
        ]
        self._around_of = {each.stage.index: each for each in self._around}
        self.results = self._around_of[reports.index].results
        with_edges = [(each.stage, each.edges) for each in self._around]
        self._ties = DistributedTies(*self._tied, arranged, with_edges)

    def evaluating(
        self, stages: list[Stage], places: list[Place], measure: LossFn
    ) -> DistributedNeighbourhood:
        """The same ranks, met by other messages; every rank calls it."""
        made = copy(self)
        made.norm, made.averaged = None, {}
        arranged = self._arranged._replace(
            places=places,
            links=self._arranged.links.evaluating(),
            apart=False,
            share_loss=False,
            evaluates=True,
        )
        made._surround(stages, arranged, measure)
        return made

    def change(self, method: Method, places: list[Place]) -> None:
        self._ties.change(method, places)

    def edges(self) -> Iterable[Receiver]:
        found: list[Receiver] = [*self._ties.edges]
        for each in self._around:
            found += [*each.own, *each.edges.inlets()]
        return found

    # A run.

    def run(self) -> AbstractContextManager[None]:
        return self._board.run()

    def order(
        self, schedule: Generator, places: list[Place]
    ) -> Iterator[tuple[int, Instruction]] | None:
        if len(self._around) == 1:
            return None
        ranks = [place.stage % self.seats.ranks for place in places]
        return device_order([schedule(place) for place in places], ranks)[self._board.rank]

    def begin(self, batches: Iterator[object], extent: Extent, keep: Keep | None = None) -> None:
        self._extent = extent
        for each in self._around:
            each.begin(batches, extent, keep)
        if self._arranged.evaluates:
            self._ties.follow()
        else:
            self._ties.begin(extent)
        for averaged in self.averaged.values():
            averaged.begin()

    def work_of(self, stage: Stage, trace: Observer | None) -> Work:
        return self._around_of[stage.index].work(trace, self._ties.ends.get(stage.index, ()))

    def leave(self) -> None:
        """End the run of all ranks, on rank 0; elsewhere train on what is still to come."""
        if self._board.rank == 0:
            self._extent.stop()
            self._say_end()

    def _say_end(self) -> None:
        for each in self._around:
            each.say_end()

    def close(self) -> None:
        self._board.doing("ending the run")
        self._ties.close()
        # From the last stage to the first, as the word goes that all gradients have been sent.
        for each in reversed(self._around):
            each.edges.close(each.heard_end)
        for each in self._around:
            each.edges.flush()

    def end(self) -> None:
        if self.norm is not None:
            self.norm.reset()
        for each in self._around:
            each.end()
        self._ties.end()


def _check_cut(found: Sequence[Mapping[str, Any]], seats: Replicas) -> None:
    """Refuse stages of one cut in another order over the ranks, which have said what they have."""
    said = [dict(rank["cut"]) for rank in found]
    for k in range(seats.stages):
        first, *others = seats.ranks_of(k)
        for r in others:
            if said[r][k] != said[first][k]:
                raise ValueError(
                    f"stage: ranks {first} and {r} have replicas of stage {k}, but other stages of "
                    f"a cut, (stage, of how many): {said[first][k]} and {said[r][k]}"
                )
    check_order([said[seats.ranks_of(k)[0]][k] for k in range(seats.stages)])
