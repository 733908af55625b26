"""Combines gradients, weights and gradient norms over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from spectrain_ext.pipeline.norms import GlobalNorm
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport import Buffer, Stream
from spectrain_ext.transport.message import LEAST_BYTES, MOST_BYTES, PIECES
from spectrain_ext.weights.storage import Flat

from .board import Board
from .links import ConnectionGuard, RankGroup

_GRADIENTS = "the gradients of the stage's other replicas"
_WEIGHTS = "the weights of the stage's other replicas"
_STAGE = "the other ranks of the stage"
_NORMS = "the norms of all ranks' gradients"


class _Collective:
    """A pending collective; all ranks of a group begin theirs in the same order."""

    def __init__(
        self,
        rank_group: RankGroup,
        board: Board,
        what: str,  # that this rank waits for, in reports
        group: dist.ProcessGroup,  # the rank group's for CPUs or for devices
        begin: Callable[..., dist.Work | None],  # a function of torch.distributed
        *tensors: object,
    ) -> None:
        self._rank_group, self._board, self._what = rank_group, board, what
        self._connection_guard = ConnectionGuard(board, rank_group.ranks, what)
        with self._connection_guard:
            work = begin(*tensors, group=group, async_op=True)
        assert work is not None
        self._work = work
        # Not work.is_completed(), which becomes true only after the future's callbacks have run.
        self._done = group is not rank_group.host  # with NCCL the stream waits
        if not self._done:
            board.calling_back.add(id(self))
            work.get_future().add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        with self._board.changed:
            self._done = True
            self._board.calling_back.discard(id(self))
            self._board.changed.notify_all()

    def wait(self) -> None:
        ranks = self._rank_group.ranks
        following = ranks[(ranks.index(self._board.rank) + 1) % len(ranks)]
        self._board.wait(lambda: self._done, following, self._what)
        with self._connection_guard:
            self._work.wait()


class _Bucket:
    """Parameters of one dtype, and a flat copy of their gradients."""

    def __init__(self, params: list[Tensor]) -> None:
        self.flat = Flat(params)
        self.missing: set[Tensor] = set()
        self.pending: _Collective | None = None

    def copy(self) -> Tensor:
        """Copy the gradients; a missing one counts as zeros."""
        views, gradients = [], []
        for p, view in self.flat.views.items():
            if p.grad is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(p.grad)
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, gradients)
        (buffer,) = self.flat.buffers
        return buffer


class GradientSum:
    """Sums a minibatch's gradients, count and CPU numbers over a stage's replicas.

    All replicas get the same bits.
    """

    _count: _Collective | None = None

    def __init__(
        self,
        params: Sequence[Tensor],  # trainable, in the same order on all replicas
        rank_group: RankGroup,
        board: Board,
        compute: Stream,  # where backwards run
        gradients: Buffer,  # that they write
    ) -> None:
        self._params = list(params)
        self._host, self._device = rank_group.host, rank_group.device
        self._begin = partial(_Collective, rank_group, board, _GRADIENTS)
        self._compute, self._gradients = compute, gradients
        self._buckets = [_Bucket(part) for part in _parts(self._params)]
        self._bucket_of = {p: b for b in self._buckets for p in b.flat.views}
        self._armed = False
        self._sent = 0
        self._handles: list[RemovableHandle] = []

    # A run

    def begin(self) -> None:
        for p in self._params:
            self._handles.append(p.register_post_accumulate_grad_hook(self._on_gradient))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._armed = False

    # A minibatch

    def expect(self) -> None:
        """Send gradients during the next backward, the minibatch's last one on this replica."""
        self._armed, self._sent = True, 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.flat.views)

    def _on_gradient(self, p: Tensor) -> None:
        if not self._armed:
            return
        bucket = self._bucket_of[p]
        if bucket.pending is not None:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, as by reentrant checkpointing, "
                "when the first was being added up over the stage's replicas"
            )
        bucket.missing.discard(p)
        # Buckets overlap with the rest of the backward. All replicas send them in the same order,
        # the last layer's first.
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        bucket.pending = self._begin(self._device, dist.all_reduce, bucket.copy())
        self._sent += 1

    def send_rest(self, count: Tensor | None) -> None:
        """Send the remaining gradients and the count, after the minibatch's last backward."""
        self._armed = False
        with self._compute.using(reads=(self._gradients,)):
            while self._sent < len(self._buckets):
                self._send()
            self._count = None
            if count is not None:
                self._count = self._begin(self._device, dist.all_reduce, count)

    def finish(self, numbers: Sequence[float], stream: Stream) -> list[float]:
        """Store the sums as gradients, on ``stream``; return the sums of ``numbers``."""
        own = [*numbers, *(float(p.grad is not None) for p in self._params)]
        tail = torch.tensor(own, dtype=torch.float64)
        # First, so that the rank notices failures before the stream waits for NCCL.
        self._begin(self._host, dist.all_reduce, tail).wait()
        with stream.using(writes=(self._gradients,)):
            for bucket in self._buckets:
                if bucket.pending is not None:
                    bucket.pending.wait()
                    bucket.pending = None
            if self._count is not None:
                self._count.wait()
        totals: list[float] = tail.tolist()
        have = totals[len(numbers) :]
        # A parameter without a gradient on every replica keeps none.
        for p, count in zip(self._params, have, strict=True):
            p.grad = self._bucket_of[p].flat.views[p] if count else None
        return totals[: len(numbers)]


def combine(tensor: Tensor, rank_group: RankGroup | None, board: Board, how: Any) -> None:
    """Combine a tensor in place over ranks (None: this one); all get the same bits."""
    if rank_group is not None:
        group = rank_group.host if tensor.is_cpu else rank_group.device
        _Collective(rank_group, board, _STAGE, group, dist.all_reduce, tensor, how).wait()


def exchange_weights(
    message: Tensor, rank_group: RankGroup, board: Board
) -> Callable[[], Sequence[Tensor]]:
    """Begin to gather the replicas' messages; the call waits for them."""
    # Gather instead of sum: gloo's order of summation depends on the number of replicas.
    messages = [torch.empty_like(message) for _ in rank_group.ranks]
    gathering = _Collective(
        rank_group, board, _WEIGHTS, rank_group.device, dist.all_gather, messages, message
    )

    def arrived() -> Sequence[Tensor]:
        gathering.wait()
        order = sorted(rank_group.ranks)
        return [messages[order.index(rank)] for rank in rank_group.ranks]

    return arrived


def _parts(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters into buckets of one dtype, in the order of their gradients."""
    whole = sum(p.nbytes for p in params)
    enough = min(max(whole // PIECES, LEAST_BYTES), MOST_BYTES)
    done: list[list[Tensor]] = []
    open_: dict[torch.dtype, list[Tensor]] = {}
    for p in reversed(params):
        part = open_.setdefault(p.dtype, [])
        part.append(p)
        if sum(q.nbytes for q in part) >= enough:
            done.append(open_.pop(p.dtype))
    return [*done, *open_.values()]


class DistributedNorm(GlobalNorm):
    """Gathers the gradient norms of all stages over gloo; the CPU waits."""

    def __init__(self, replicas: Replicas, board: Board, all_ranks: RankGroup) -> None:
        super().__init__(replicas.stages)
        self._replicas, self._board, self._all_ranks = replicas, board, all_ranks
        self._mine = replicas.stages_on(board.rank)
        self._own = torch.zeros(replicas.stages, 2, dtype=torch.float64)

    def give(self, i: int, stage: int, norm: Tensor, buffer: Buffer, stream: Stream) -> None:
        """Add a stage's norm of minibatch i; the rank's last one waits for all ranks'."""
        super().give(i, stage, norm, buffer, stream)
        with stream.using(reads=(buffer,)):
            self._own[stage] = norm.to("cpu", torch.float64)
        if not self.has(self._mine):  # this rank's last stage gathers for all of them
            return
        rank_group = self._all_ranks
        found = [torch.empty_like(self._own) for _ in rank_group.ranks]
        _Collective(
            rank_group, self._board, _NORMS, rank_group.host, dist.all_gather, found, self._own
        ).wait()
        for k in range(self._replicas.stages):
            of_replicas = [found[rank][k] for rank in self._replicas.ranks_of(k)]
            told = torch.stack(of_replicas)[:, 1].amax()  # with averaging, replicas differ
            if k not in self._mine or told:
                # Replicas have summed their gradients, so they share one norm, counted once.
                theirs = torch.stack([of_replicas[0][0], told])
                super().give(i, k, theirs, Buffer(f"gradient norm of stage {k}"), stream)
