"""Defines ``Ranks``: what the processes of a pipeline do for one another, seen from one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.cutting import cut_of
from spectrain_ext.method import check_replicas
from spectrain_ext.passes import ShareLoss
from spectrain_ext.pipeline.applied_method import AppliedMethod
from spectrain_ext.pipeline.arguments import check_trains
from spectrain_ext.pipeline.factories import check_hidden, hidden_use
from spectrain_ext.pipeline.losses import Result, mean_of
from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.processes import Depth, Ends, Processes, Traffic
from spectrain_ext.pipeline.run import Run
from spectrain_ext.pipeline.stage import Stage
from spectrain_ext.pipeline.stage_run import StageRun
from spectrain_ext.pipeline.tie_ends import bring_true
from spectrain_ext.pipeline.ties import Copy, TiedStages, look_of
from spectrain_ext.pipeline.wires import Wires
from spectrain_ext.schedule import Generator, Instruction, Kind, Place
from spectrain_ext.schedule.order import device_order
from spectrain_ext.transport import Buffer

from .agreement import (
    agreed_ties,
    check_cut,
    check_equal,
    check_equal_start,
    rules_to_compare,
    start_of,
)
from .board import Board
from .collectives import DistributedNorm, GradientSum, combine, exchange_weights
from .ends import RemoteReceiver, RemoteSender
from .failures import Sharing
from .links import Links, RankGroup, backend_of_bodies, break_on_failure, gpu_of, open_links
from .mesh import RankLayout


class Ranks(Processes):
    """The ranks of a pipeline, each with some stages, a replica of one, or a shard of a replica."""

    receives_block = True
    _links: Links
    _total: GradientSum | None = None  # over the stage's replicas

    def __init__(
        self,
        members: Sequence[int],  # the pipeline's ranks, in the default group
        prefix: str,  # of this pipeline, for names of groups
        board: Board,
        layout: RankLayout,
        passes: Sequence[Pass],  # the caller's
        of_every_stage: Sequence[Pass],  # before those
        clip_norm: float | None,
        settings: Mapping[str, Any],  # others that all ranks must share
        of_stage: Mapping[str, object],  # those that the ranks of a stage must share
    ) -> None:
        replicas, where, shards = layout
        super().__init__(replicas, replicas.stages_on(board.rank))
        self._given_passes, self.passes = passes, of_every_stage
        self.takes_batches = board.rank == 0  # rank 0 also decides the length of a run
        self.own_minibatches = any(each.own_minibatches for each in passes)
        self.replica = replicas.stage_and_replica(replicas.numbers_on(board.rank)[0])[1]
        self._members, self._prefix, self._board = members, prefix, board
        self._where = where and f"{where}: "
        self._shards, self.sharded = shards, shards is not None
        self.shard, self.shards = replicas.shard_of(board.rank), len(replicas.rows[0])
        self._clip_norm, self._settings = clip_norm, settings
        self._of_stage = {"clip_norm": clip_norm, **of_stage}

    def connect(
        self,
        stages: Sequence[Stage],
        methods: Sequence[AppliedMethod],
        copies: Sequence[Copy],
        has_count: bool,
    ) -> Sequence[TiedStages]:
        """Compare settings with the other ranks and open links; every rank calls this."""
        board, replicas, first = self._board, self.replicas, stages[0]
        weights = first.weights
        if len({stage.device for stage in stages}) > 1:
            where = ", ".join(str(stage.device) for stage in stages)
            raise ValueError(f"stage: the stages of a rank must be on one device, got {where}")
        settings = {
            "stage": f"{len(stages)} stages",
            "replicas": list(replicas.counts),
            **self.terms(methods),
            "device": first.device.type,
            "count": "given" if has_count else "none",
            "group": "a mesh with 'tp'" if self.sharded else "whole stages",
            "passes": repr(self._given_passes),
            **self._settings,
        }
        own = {
            "copies": [[*copy.member, look_of(copy.held)] for copy in copies],
            "cut": [[s.index, cut_of(s.module).place] for s in stages],
            "hidden": hidden_use(s.weights for s in stages),
            "trains": any(stage.weights is not None for stage in stages),
            "start": {
                str(stage.index): start_of(stage, self._of_stage, replicas.dealt)
                for stage in (stages if replicas.dealt or self.sharded else ())
            },
            "gpu": gpu_of(first.device),
        }
        of_ranks = board.exchange_json("meeting", {**settings, **own})
        check_equal(of_ranks, board.rank, settings)
        check_cut(of_ranks, replicas)
        check_trains(rank["trains"] for rank in of_ranks)
        firsts = (replicas.ranks_of(k)[0] for k in range(replicas.stages))
        check_hidden([rank["hidden"] for rank in of_ranks], firsts)
        modules = {stage.index: stage.module for stage in stages}
        ties = agreed_ties(board, replicas, modules, copies, of_ranks)
        check_equal_start(of_ranks, replicas)
        bodies = backend_of_bodies([rank["gpu"] for rank in of_ranks])
        self._links = open_links(
            self._members, self._prefix, first.device, board, replicas, bodies, ties
        )
        if self._shards is not None:  # not before: what is refused leaves the caller's groups alone
            made = self._shards.get_group()
            break_on_failure(made, dist.get_backend(made), board)
            others = [rank for rank in self.row_of(first.index) if rank != board.rank]
            board.sharing = Sharing(others, partial(_begun_in, made))
        rank_group = self._links.replicas
        if rank_group is not None and not self.own_minibatches:
            params = [] if weights is None else weights.params
            self._total = GradientSum(
                params, rank_group, board, first.compute, first.weight_gradients
            )
        return ties

    def terms(self, methods: Sequence[AppliedMethod]) -> dict[str, object]:
        """Return what all ranks must have in common under these methods, as JSON values."""
        for each in methods if not self.own_minibatches else ():
            check_replicas(each.method, each.places, self.replicas, self._given_passes)
        globally = any(each.globally for each in methods)
        return {
            "method": methods[0].method.name,
            "microbatches": methods[0].places[0].microbatches * self.replicas.counts[0],
            **rules_to_compare(methods),
            "clip_norm": self._clip_norm if globally else None,
        }

    @property
    def all_ranks(self) -> RankGroup:
        return self._links.all_ranks

    def remote_ends(
        self, stages: Mapping[int, Stage], depth: Depth, evaluates: bool
    ) -> dict[Ends, Any]:
        board = self._board
        made: dict[Ends, Any] = {}
        for link in self._links.evaluating() if evaluates else self._links.edges:
            a, b = link.stages
            slots = depth(link.ends)
            if link.sender == board.rank:
                made[link.ends] = RemoteSender(link, stages[a].device, slots, board)
            else:
                to = stages[b]
                made[link.ends] = RemoteReceiver(link, to.device, to.compute, slots, board)
        return made

    def norm(self) -> DistributedNorm:
        return DistributedNorm(self.replicas, self._board, self.all_ranks)

    def largest(self, number: float) -> float:
        found = torch.tensor(number, dtype=torch.float64)
        summing = None if self._total is None else self._links.replicas
        for rank_group in (summing, self._links.shards):
            combine(found, rank_group, self._board, dist.ReduceOp.MAX)
        return float(found)

    def over_shards(self, tensor: Tensor) -> None:
        """Add up a tensor, in place, over the ranks that share this one's replica."""
        combine(tensor, self._links.shards, self._board, dist.ReduceOp.SUM)

    def row_of(self, stage: int) -> Sequence[int]:
        """Return the ranks that share this one's replica of a stage."""
        return self.replicas.rows[self.replicas.indices_of(stage)[self.replica]]

    def exchange(self, message: Tensor) -> Callable[[], Sequence[Tensor]]:
        assert self._links.replicas is not None
        return exchange_weights(message, self._links.replicas, self._board)

    # A run.

    def during(self, wires: Wires) -> AbstractContextManager[None]:
        return self._board.run("an evaluation" if wires.evaluates else "run")

    def order(
        self, schedule: Generator, places: list[Place]
    ) -> Iterator[tuple[int, Instruction]] | None:
        if len(self.indices) == 1:
            return None
        # All ranks use the same order, so a rank may block on its next instruction.
        rounds = len(places) // len(self.indices)  # ranks with a stage each
        ranks = [place.stage % rounds for place in places]
        order = device_order([schedule(place) for place in places], ranks)
        return (at for at in order if at[0] in self.indices)

    def begin(self, run: Run) -> None:
        for receiver in _receivers(run.wires):
            with receiver.connection_guard:  # the other rank may have ended since the last call
                receiver.begin()
        if self._total is not None and run.trains:
            self._total.begin()
        if not run.trains:
            bring_true(run.wires.tie_ends)

    def handlers(self, run: Run, stage: StageRun) -> Mapping[Kind, Handler]:
        if not run.trains:
            return {}
        passes, total = stage.stage.passes, self._total
        shared = next((each for each in passes if isinstance(each, ShareLoss)), None)
        reports = stage is run.stages[0] and run.losses is None  # that a minibatch has ended

        def report(i: int, j: int) -> None:
            loss = None
            if shared is not None:
                loss = torch.tensor(shared.known.pop(i, nan), dtype=torch.float64)
                if shared.in_parts and stage.divisor is not None:
                    with stage.stage.predict.using():  # which has waited for the sum
                        loss = mean_of(loss, stage.divisor.cpu())
            if reports:
                run.results.append(Result(i, loss))

        def expect(i: int, j: int) -> None:
            if total is not None and j == stage.microbatches_of(i) - 1:
                total.expect()

        made: dict[Kind, Handler] = {}
        if reports or shared is not None:
            made[Kind.REPORT] = report
        if total is not None:
            made[Kind.EXPECT_SUM] = expect
            made[Kind.SUM_GRADIENTS] = partial(_sum_up, run, stage, total, shared)
        return made

    def announce(self, run: Run, stage: Stage) -> Callable[[Kind, int, int], None]:
        board, replica, count = self._board, self.replica, self.replicas.counts[stage.index]
        before = self._where if run.trains else f"{self._where}evaluation, "
        if len(self.indices) > 1:
            before = f"stage {stage.index}, {before}"

        def begins(kind: Kind, i: int, j: int) -> None:
            board.check()
            microbatch = replica + j * count  # j counts this replica's microbatches
            board.set_doing(before + kind.value, "of minibatch", i, "microbatch", microbatch)

        return begins

    def yields(self, result: Result) -> None:
        self._board.hand_out(result.index)

    def leaves(self, results: int, why: str) -> None:
        self._board.leave(results, why)

    def close(self, run: Run) -> None:
        self._board.set_doing("ending the run")
        if run.trains:
            bring_true(run.wires.tie_ends)
        # The end of the gradients is passed on from the last stage to the first.
        for stage in reversed(run.stages):
            _receive_ends(run.wires, stage)
        for sender in _senders(run.wires):
            sender.flush()

    def end(self) -> None:
        if self._total is not None:
            self._total.end()


def _begun_in(group: Any) -> int:
    """Return how many collectives a group has begun."""
    number: int = group._get_sequence_number_for_group()
    return number


def _receivers(wires: Wires) -> list[RemoteReceiver]:
    return [end for end in wires.remote.values() if isinstance(end, RemoteReceiver)]


def _senders(wires: Wires) -> list[RemoteSender]:
    return [end for end in wires.remote.values() if isinstance(end, RemoteSender)]


def _receive_ends(wires: Wires, stage: StageRun) -> None:
    """Receive the end of every edge into a stage, then end its gradient edges."""
    k, ended_by = stage.stage.index, stage.compute.ended_by
    for receiver in _receivers(wires):
        link = receiver.link
        if link.stages[1] != k or link.what is Traffic.INPUTS or receiver is ended_by:
            continue
        if receiver.receive() is not None:
            raise RuntimeError(f"{link.name}: a message comes that nothing here takes")
    for sender in _senders(wires):
        if sender.link.what is Traffic.GRADIENTS and sender.link.stages[0] == k:
            sender.end()


def _sum_up(
    run: Run, of: StageRun, total: GradientSum, shared: ShareLoss | None, i: int, j: int
) -> None:
    """Sum a minibatch's gradients and loss over the stage's replicas."""
    stage, losses = of.stage, run.losses
    total.send_rest(of.count_of(i))
    own_loss, own_count = nan, nan
    if losses is not None:
        loss, count, _ = losses.own[i]
        own_loss = loss.item()
        own_count = nan if count is None else count.item()
    elif shared is not None:
        own_loss = shared.known.get(i, nan)
    stage.predict.wait_stream(stage.compute)
    loss_sum, count_sum = total.finish((own_loss, own_count), stage.predict)
    if shared is not None:
        shared.known[i] = loss_sum
    if losses is not None:
        loss, count, kept = losses.own.pop(i)
        result = Buffer("result")
        with stage.computing(writes=(result,)):
            loss = torch.full_like(loss, loss_sum)
            if count is not None:
                count = torch.full_like(count, count_sum)
                loss = mean_of(loss, count)
        losses.give(Result(i, loss, kept, count), result)
