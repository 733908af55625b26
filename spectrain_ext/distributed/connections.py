"""Connects a rank's stages to their neighbours, replicas and the caller's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import nan

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.method import Method, check_replicas, phases_of
from spectrain_ext.operators.averaging import Exchange
from spectrain_ext.passes import ShareLoss
from spectrain_ext.pipeline.arguments import check_hidden, check_trains, cut_place, hidden_use
from spectrain_ext.pipeline.batch import SplitDim
from spectrain_ext.pipeline.connections import Connections
from spectrain_ext.pipeline.edges import TIED, Traffic
from spectrain_ext.pipeline.loads import GlobalNorm
from spectrain_ext.pipeline.losses import Keep, Losses, LossFn, Result, mean_of
from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.phases import widest
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.ties import Copy, look_of
from spectrain_ext.schedule import Generator, Instruction, Kind, Place, Replicas, name_of
from spectrain_ext.schedule.order import device_order
from spectrain_ext.transport import Receiver

from .agreement import (
    agreed_ties,
    check_cut,
    check_equal_start,
    compare_settings,
    rules_to_compare,
)
from .board import Board
from .collectives import DistributedNorm, GradientSum, weight_exchange
from .ends import RemoteReceiver, RemoteSender
from .links import Links, RankGroup, backend_of_bodies, open_links, open_rank_group


class RankConnections(Connections):
    """The edges and collectives of one rank's stages."""

    receives_block = True
    links: Links
    _receivers: list[RemoteReceiver]
    _senders: list[RemoteSender]
    _all_ranks: RankGroup | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        board: Board,
        replicas: Replicas,
        dynamic_shapes: bool,
        clip_norm: float | None,
        clip_scope: str,
        passes: Sequence[Pass] = (),
        split_dim: SplitDim = 0,
    ) -> None:
        super().__init__(replicas.stages, split_dim)
        self.replicas = replicas
        self.indices = replicas.stages_on(board.rank)
        self.takes_batches = board.rank == 0  # rank 0 also decides the length of a run
        self.own_minibatches = any(each.own_minibatches for each in passes)
        self.replica = replicas.stage_and_replica(board.rank)[1]
        self._group, self._board = group, board
        self._settings = {
            "dynamic_shapes": dynamic_shapes,
            "clip_scope": clip_scope,
            "passes": repr(passes),
            "split_dim": repr(split_dim),
        }
        self._passes = passes
        self.norm: GlobalNorm | None = DistributedNorm(replicas, board)
        self._clip_norm = clip_norm
        self._total: GradientSum | None = None  # over the stage's replicas
        self._exchange: Exchange | None = None  # with a stage's other replicas

    def connect(
        self,
        stages: list[Stage],
        of_phases: Sequence[list[Place]],
        method: Method,
        loss_fn: LossFn,
        copies: Sequence[Copy],
    ) -> None:
        """Compare settings with the other ranks and open edges; every rank calls this."""
        board, replicas, first = self._board, self.replicas, stages[0]
        if len({stage.device for stage in stages}) > 1:
            where = ", ".join(str(stage.device) for stage in stages)
            raise ValueError(f"stage: the stages of a rank must be on one device, got {where}")
        self._stages, self.loss_fn, places = stages, loss_fn, widest(of_phases)
        if not self.own_minibatches:
            check_replicas(method, of_phases, replicas)
        found = compare_settings(
            board,
            {
                "stage": f"{len(stages)} stages",
                "replicas": list(replicas.counts),
                "method": method.name,
                "schedule": ", ".join(name_of(phase.schedule) for phase in phases_of(method)),
                "microbatches": places[0].microbatches * replicas.counts[0],
                "window": [each.window for each in places],
                **rules_to_compare(method, of_phases),
                "device": first.device.type,
                "count": "none" if self.count is None else "given",
                "clip_norm": None if self.norm is None else self._clip_norm,
                **self._settings,
            },
            {
                "copies": [[*copy.member, look_of(copy.held)] for copy in copies],
                "cut": [[s.index, cut_place(s.module)] for s in stages],
                "hidden": hidden_use(s.weights for s in stages),
                "trains": any(stage.weights is not None for stage in stages),
            },
        )
        check_cut(found, replicas)
        check_trains(rank["trains"] for rank in found)
        firsts = (replicas.ranks_of(k)[0] for k in range(replicas.stages))
        check_hidden([rank["hidden"] for rank in found], firsts)
        modules = {stage.index: stage.module for stage in stages}
        ties = agreed_ties(board, replicas, modules, copies, found)
        if replicas.dealt:
            optimizer = None if first.weights is None else first.weights.optimizer
            check_equal_start(board, replicas, first.module, optimizer)
        bodies = backend_of_bodies(board, first.device)
        grows = len(of_phases) > 1 and any(each.resizes for each in self._passes)
        dynamic = bool(self._settings["dynamic_shapes"] or grows)
        self.links = open_links(self._group, first.device, board, dynamic, replicas, bodies, ties)
        if isinstance(self.norm, DistributedNorm):
            self.norm.rank_group = self.all_ranks()
        rank_group, weights = self.links.rank_group, first.weights
        if rank_group is not None and not self.own_minibatches:
            params = [] if weights is None else weights.params
            self._total = GradientSum(
                params, rank_group, board, first.compute, first.weight_gradients
            )
        elif rank_group is not None:
            self._exchange = weight_exchange(rank_group, board)
        self._losses = None
        if stages[-1].index == replicas.stages - 1:
            self._losses = Losses(stages[-1], loss_fn, self.results, held=self._total is not None)
        self._open(ties, copies, method, places)

    def all_ranks(self) -> RankGroup:
        """Return a CPU group of all ranks, which is connected on first use."""
        if self._all_ranks is None:
            self._all_ranks = open_rank_group(self._group, self._board)
        return self._all_ranks

    def _join(self, places: list[Place], postponed: Sequence[int]) -> None:
        self._places, self._postponed = places, postponed
        board, here = self._board, self._by_index
        self._receivers, self._senders, self._remote = [], [], {}
        for link in self.links.edges:
            what, sends, (a, b) = link.what, link.sender == board.rank, link.stages
            stage = here[a if sends else b]
            mine = self.replicas.runs(stage.index, self.replica)
            ends: tuple[int | None, int] = (mine, link.at) if sends else (link.at, mine)
            depth = self._depth(what, b)
            if what in TIED:
                ends, depth = (None, link.at), self._depth_of_tie(min(a, b), max(a, b))
            elif what in (Traffic.INPUTS, Traffic.TARGETS):
                ends = None, ends[1]
            if sends:
                sender = RemoteSender(link, stage.device, depth, board)
                self._senders.append(sender)
                self._remote[what, *ends] = sender
            else:
                receiver = RemoteReceiver(link, stage.device, stage.compute, depth, board)
                self._receivers.append(receiver)
                self._remote[what, *ends] = receiver
        super()._join(places, postponed)

    def _only_forward(self) -> None:
        self._total = None
        self.links = self.links.evaluating()

    def receivers(self) -> Iterable[Receiver]:
        return (*super().receivers(), *self._receivers)

    # Instructions of a stage

    def handlers(self, stage: Stage) -> dict[Kind, Handler]:
        total = self._total
        shared = next((each for each in stage.passes if isinstance(each, ShareLoss)), None)

        def report(i: int, j: int) -> None:
            told = None
            if shared is not None:
                told = torch.tensor(shared.known.pop(i, nan), dtype=torch.float64)
                if shared.in_parts and stage.divisor is not None:
                    with stage.predict.using():  # which has waited for the sum
                        told = mean_of(told, stage.divisor.cpu())
            if stage is self._stages[0] and self._losses is None:
                self.results.append(Result(i, told))

        found = super().handlers(stage)
        reports = shared is not None or (stage is self._stages[0] and self._losses is None)
        if reports and not self.evaluates:
            found[Kind.REPORT] = report
        if total is not None:
            found[Kind.EXPECT_SUM] = partial(self._expect_last, stage, total)
            found[Kind.SUM_GRADIENTS] = partial(self._sum_up, stage, total, shared)
        return found

    def _expect_last(self, stage: Stage, total: GradientSum, i: int, j: int) -> None:
        if j == len(stage.cursor.shares[i]) - 1:
            total.expect()

    def _sum_up(
        self, stage: Stage, total: GradientSum, shared: ShareLoss | None, i: int, j: int
    ) -> None:
        total.send_rest(stage.counts.get(i))
        stage.compute.record(stage.computed)
        number, counted, own = nan, nan, None
        if self._losses is not None:
            own = self._losses.own.pop(i)
            number = own[0].item()
            counted = nan if own[1] is None else own[1].item()
        elif shared is not None:
            number = shared.known.get(i, nan)
        stage.predict.wait(stage.computed)
        number, counted = total.finish((number, counted), stage.predict)
        if shared is not None:
            shared.known[i] = number
        if own is not None:
            loss, count, kept = own
            loss = torch.full_like(loss, number)
            if count is not None:
                count = torch.full_like(count, counted)
                loss = mean_of(loss, count)
            self.results.append(Result(i, loss, kept, count))

    def largest(self, number: float) -> float:
        return number if self._total is None else self._total.largest(number)

    def exchange(self, message: Tensor) -> Callable[[], Sequence[Tensor]]:
        assert self._exchange is not None
        return self._exchange(message)

    def announce(self, stage: Stage) -> Callable[[Kind, int, int], None]:
        board, replica, count = self._board, self.replica, self.replicas.counts[stage.index]
        before = "evaluation, " if self.evaluates else ""
        if len(self._stages) > 1:
            before = f"stage {stage.index}, {before}"

        def begins(kind: Kind, i: int, j: int) -> None:
            board.check()
            microbatch = replica + j * count  # j counts this replica's microbatches
            board.set_action(before + kind.value, "of minibatch", i, "microbatch", microbatch)

        return begins

    # A run

    def run(self) -> AbstractContextManager[None]:
        return self._board.run(messages=self._counts)

    def _counts(self) -> list[tuple[str, dict[str, int]]]:
        return [(end.link.name, end.counts()) for end in self._remote.values()]

    def order(
        self, schedule: Generator, places: list[Place]
    ) -> Iterator[tuple[int, Instruction]] | None:
        if len(self._stages) == 1:
            return None
        # All ranks use the same order, so a rank may block on its next instruction.
        ranks = [place.stage % self.replicas.ranks for place in places]
        return device_order([schedule(place) for place in places], ranks)[self._board.rank]

    def begin(self, batches: Iterator[object], keep: Keep | None = None) -> None:
        for receiver in self._receivers:
            receiver.begin()
        if self._total is not None:
            self._total.begin()
        super().begin(batches, keep)
        if self.evaluates:
            self._ties.bring_true()

    def yields(self, result: Result) -> None:
        self._board.set_action("the caller's loop, which has the result of minibatch", result.index)

    def close(self) -> None:
        board = self._board
        board.set_action("ending the run")
        if not self.evaluates:
            self._ties.bring_true()
        # The end of the gradients is passed on from the last stage to the first.
        for stage in reversed(self._stages):
            self._receive_ends(stage.index)
        for sender in self._senders:
            sender.flush()

    def _receive_ends(self, k: int) -> None:
        """Receive the end of every edge into stage k, then end its gradient edges."""
        ended_by = self.edges[k].ended_by
        for receiver in self._receivers:
            link = receiver.link
            if link.stages[1] != k or link.what is Traffic.INPUTS or receiver is ended_by:
                continue
            if receiver.receive() is not None:
                raise RuntimeError(f"{link.name}: a message comes that nothing here takes")
        for sender in self._senders:
            if sender.link.what is Traffic.GRADIENTS and sender.link.stages[0] == k:
                sender.end()

    def end(self) -> None:
        if self._total is not None:
            self._total.end()
        super().end()
