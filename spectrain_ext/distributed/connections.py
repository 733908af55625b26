"""RankConnections: what joins the stages of a rank to those of other ranks, and to its replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import nan
from typing import Any

import torch
import torch.distributed as dist

from spectrain_ext.method import (
    Method,
    check_replicas,
    phases_of,
    put_off_by,
)
from spectrain_ext.operators.averaging import Averaging
from spectrain_ext.pipeline.arguments import check_order, cut_place
from spectrain_ext.pipeline.averaging import Averaged
from spectrain_ext.pipeline.batch import SplitDim
from spectrain_ext.pipeline.connections import Connections
from spectrain_ext.pipeline.edges import SharedLosses, Traffic
from spectrain_ext.pipeline.loads import GlobalNorm, Handler
from spectrain_ext.pipeline.losses import Keep, Losses, LossFn, Result
from spectrain_ext.pipeline.phases import widest
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.ties import Copy
from spectrain_ext.rng import StageRandom
from spectrain_ext.schedule import (
    Duties,
    Generator,
    Instruction,
    Kind,
    Place,
    Replicas,
    device_order,
    name_of,
)
from spectrain_ext.transport import Receiver, Sender

from .board import Board
from .collectives import DistributedNorm, GradientSum, WeightExchange
from .ends import Inlet, Outlet
from .equal_start import check_equal_start, resolved
from .links import Link, Links, backend_of_bodies, open_host_group, open_links
from .ties import agreed, copies_here, seats_of

_TOO_MANY = {
    Traffic.ACTIVATIONS: "the previous rank sends a microbatch that nothing here takes",
    Traffic.GRADIENTS: "the next rank sends a gradient that nothing here waits for",
    Traffic.TARGETS: "rank 0 sends a target that nothing here takes",
    Traffic.TIED_WEIGHTS: "tied weights come that nothing here takes",
    Traffic.TIED_GRADIENTS: "gradients of tied weights come that nothing here waits for",
}


class RankConnections(Connections):
    """What one rank's stages are connected to: the ranks around it, their replicas, the caller.

    Rank 0 alone has batches, and decides how long a run is. Where a rank has several stages, they
    go through the run in an order that all ranks agree on, so that the rank may wait for what comes
    next. The schedule of a replica counts its own microbatches.

    Args:
        group: the ranks, stage by stage; None: the default group.
        board: what the ranks know of each other.
        replicas: of all stages, and the ranks that have them.
        dynamic_shapes: whether later messages may be larger than the first.
        share_loss: whether every rank gets the losses.
        clip_norm, clip_scope: what gradients are clipped to, and whose as one.
        averaging: replicas do not add up gradients, but average weights by this.
        split_dim: along which dimensions minibatches are cut.
    """

    links: Links

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        board: Board,
        replicas: Replicas,
        dynamic_shapes: bool,
        share_loss: bool,
        clip_norm: float | None,
        clip_scope: str,
        averaging: Averaging | None = None,
        split_dim: SplitDim = 0,
    ) -> None:
        super().__init__(replicas.stages, split_dim)
        self.replicas = replicas
        self.indices = replicas.stages_on(board.rank)
        self.takes_batches = board.rank == 0
        self.own_minibatches = averaging is not None
        self.replica = replicas.seat(board.rank)[1]
        self._group, self._board = group, board
        self._settings = {
            "dynamic_shapes": dynamic_shapes,
            "share_loss": share_loss,
            "clip_scope": clip_scope,
            "averaging": repr(averaging),
            "split_dim": repr(split_dim),
        }
        self._averaging, self._share_loss = averaging, share_loss
        self.norm: GlobalNorm | None = DistributedNorm(replicas, board)
        self._clip_norm = clip_norm
        self._total: GradientSum | None = None  # over the stage's replicas
        self._shared: dict[int, SharedLosses] = {}

    def connect(
        self,
        stages: list[Stage],
        of_phases: Sequence[list[Place]],
        method: Method,
        loss_fn: LossFn,
        copies: Sequence[Copy],
    ) -> None:
        """Meet the other ranks, and open the edges to some of them; every rank calls it."""
        board, seats, first = self._board, self.replicas, stages[0]
        if len({stage.device for stage in stages}) > 1:
            where = ", ".join(str(stage.device) for stage in stages)
            raise ValueError(f"stage: the stages of a rank must be on one device, got {where}")
        self._stages, self.loss_fn, places = stages, loss_fn, widest(of_phases)
        if self._averaging is None:
            check_replicas(method, of_phases, seats)
        found = board.meet(
            {
                "stage": f"{len(stages)} stages",
                "replicas": list(seats.counts),
                "method": method.name,
                "schedule": ", ".join(name_of(phase.schedule) for phase in phases_of(method)),
                "microbatches": places[0].microbatches * seats.counts[0],
                "window": [each.window for each in places],
                **resolved(method, of_phases),
                "device": first.device.type,
                "clip_norm": None if self.norm is None else self._clip_norm,
                **self._settings,
            },
            {**copies_here(copies), "cut": [[s.index, cut_place(s.module)] for s in stages]},
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
            self.links = links = open_links(
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
        if links.circle is not None and self._averaging is not None:
            if first.weights is not None:
                exchange = WeightExchange(links.circle, board)
                self.averaged = {first.index: Averaged(first, self._averaging, exchange)}
        elif links.circle is not None:
            params = [] if first.weights is None else first.weights.params
            self._total = GradientSum(
                params, links.circle, board, first.compute, first.weight_gradients
            )
        last = seats.stages - 1
        if self._share_loss:
            self._shared = {s.index: SharedLosses(seats.dealt, s.index > 0) for s in stages}
            for stage in stages:
                stage.losses = self._shared[stage.index]
        self._losses = None
        if stages[-1].index == last:
            shared, held = self._shared.get(last), self._total is not None
            self._losses = Losses(stages[-1], loss_fn, self.results, shared, held)
        self._ties_between(ties, copies, method)
        self._join(places, put_off_by(method, places))

    def _join(self, places: list[Place], later: Sequence[int]) -> None:
        self._places, self._later = places, later
        here = self._by_index

        def inlet(link: Link, what: Traffic) -> Inlet:
            stage = here[link.stages[1]]
            depth = self._depth_of(link, what)
            return Inlet(link, stage.device, stage.compute, depth, self._board)

        def outlet(link: Link, what: Traffic) -> Outlet:
            depth = self._depth_of(link, what)
            return Outlet(link, here[link.stages[0]].device, depth, self._board)

        self._inlets = {
            what: {at: inlet(link, what) for at, link in ends.items()}
            for what, ends in self.links.into.items()
        }
        self._outlets = {
            what: {at: outlet(link, what) for at, link in ends.items()}
            for what, ends in self.links.out.items()
        }
        super()._join(places, later)

    def _remote_ends(self, tie: int) -> tuple[Any, Any]:
        weights, gradients = Traffic.TIED_WEIGHTS, Traffic.TIED_GRADIENTS
        if tie in self._outlets[weights]:
            return self._outlets[weights][tie], self._inlets[gradients].get(tie)
        return self._inlets[weights][tie], self._outlets[gradients].get(tie)

    def _receiver(self, what: Traffic, a: int | None, b: int) -> Receiver:
        if a is None and self.takes_batches:
            return self._edge(what, a, b)
        return self._inlets[what][0 if a is None else a]

    def _sender(self, what: Traffic, a: int | None, b: int) -> Sender:
        outlet = self._outlets[what].get(b)
        return self._edge(what, a, b) if outlet is None else outlet

    def _depth_of(self, link: Link, what: Traffic) -> int:
        if what.tied:
            return self._depth_of_tie(min(link.stages), max(link.stages))
        return self._depth(what, link.stages[1])

    def _only_forward(self) -> None:
        self._total, self._shared = None, {}
        self.links = self.links.evaluating()

    def _all_inlets(self) -> Iterator[Inlet]:
        for inlets in self._inlets.values():
            yield from inlets.values()

    def receivers(self) -> Iterable[Receiver]:
        return (*super().receivers(), *self._all_inlets())

    # What a stage does in a run.

    def duties(self, stage: Stage) -> Duties:
        first = self._stages[0]
        return (
            super()
            .duties(stage)
            ._replace(
                pulls=stage is first and self._source is not None,
                blocks=True,
                sums=self._total is not None,
                reports=(stage is first and self._losses is None) or stage.index in self._shared,
            )
        )

    def handlers(self, stage: Stage) -> dict[Kind, Handler]:
        found = super().handlers(stage)
        total, shared = self._total, self._shared.get(stage.index)

        def expect(i: int, j: int) -> None:
            """The backward that comes next is the minibatch's last one, or is not."""
            if total is not None and j == len(stage.cursor.shares[i]) - 1:
                total.expect()

        def sum_up(i: int, j: int) -> None:
            if total is not None:
                self._sum_up(total, stage, shared, i)

        def report(i: int, j: int) -> None:
            value = nan if shared is None else shared.known.pop(i, nan)
            if stage is self._stages[0] and self._losses is None:
                told = None if shared is None else torch.tensor(value, dtype=torch.float64)
                self.results.append(Result(i, told))

        own = {Kind.EXPECT_SUM: expect, Kind.SUM_GRADIENTS: sum_up, Kind.REPORT: report}
        return {**found, **own}

    def _sum_up(
        self, total: GradientSum, stage: Stage, shared: SharedLosses | None, i: int
    ) -> None:
        """Add up gradients, and the loss, over the stage's replicas."""
        total.send_rest()
        stage.compute.record(stage.computed)
        number, own = nan, None
        if self._losses is not None:
            own = self._losses.own.pop(i)
            number = own[0].item()
        elif shared is not None:
            number = shared.known.get(i, nan)
        stage.predict.wait(stage.computed)
        number = total.finish(number, stage.predict)
        if shared is not None:
            shared.known[i] = number
        if own is not None:
            loss, kept = own
            self.results.append(Result(i, torch.full_like(loss, number), kept))

    def announce(self, stage: Stage) -> Callable[[Kind, int, int], None]:
        board, replica, count = self._board, self.replica, self.replicas.counts[stage.index]
        before = "evaluation, " if self.evaluates else ""
        if len(self._stages) > 1:
            before = f"stage {stage.index}, {before}"

        def begins(kind: Kind, i: int, j: int) -> None:
            if board.cause is not None:
                board.check()
            microbatch = replica + j * count
            board.doing(before + kind.value, "of minibatch", i, "microbatch", microbatch)

        return begins

    # A run.

    def run(self) -> AbstractContextManager[None]:
        return self._board.run()

    def order(
        self, schedule: Generator, places: list[Place]
    ) -> Iterator[tuple[int, Instruction]] | None:
        if len(self._stages) == 1:
            return None
        ranks = [place.stage % self.replicas.ranks for place in places]
        return device_order([schedule(place) for place in places], ranks)[self._board.rank]

    def begin(self, batches: Iterator[object], keep: Keep | None = None) -> None:
        for inlet in self._all_inlets():
            inlet.begin()
        for shared in self._shared.values():
            shared.begin()
        if self._total is not None:
            self._total.begin()
        super().begin(batches, keep)
        if self.evaluates:
            self._ties.bring_true()

    def yields(self, result: Result) -> None:
        self._board.doing("the caller's loop, which has the result of minibatch", result.index)

    def close(self) -> None:
        board = self._board
        board.doing("ending the run")
        if not self.evaluates:
            self._ties.bring_true()
        # From the last stage to the first, as the word goes that all gradients have been sent.
        for stage in reversed(self._stages):
            self._hear_ends(stage.index)
        for outlets in self._outlets.values():
            for outlet in outlets.values():
                outlet.flush()

    def _hear_ends(self, k: int) -> None:
        """Hear that all has been sent to a stage, and say so to the previous one."""
        heard = self.edges[k].heard_end
        for what, said in _TOO_MANY.items():
            for inlet in self._inlets[what].values():
                mine = inlet.link.stages[1] == k
                if mine and inlet is not heard and inlet.receive() is not None:
                    raise RuntimeError(said)
        for outlet in self._outlets[Traffic.GRADIENTS].values():
            if outlet.link.stages[0] == k:
                outlet.end()

    def end(self) -> None:
        if self._total is not None:
            self._total.end()
        super().end()


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
