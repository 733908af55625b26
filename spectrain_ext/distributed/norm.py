"""DistributedNorm: the norm of a gradient whose parts are in several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.pipeline.clipping import GlobalNorm
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport import Buffer, Stream

from .board import Board

_WHAT = "the norms of all ranks' gradients"


class DistributedNorm(GlobalNorm):
    """Every rank gives its stage's norm and hears all others', over gloo: the host waits for it.

    Replicas have added up their gradients by then and give the same norm, which counts once.

    Args:
        replicas: of every stage.
        board: names a failure.
    """

    def __init__(self, replicas: Replicas, board: Board) -> None:
        super().__init__(replicas.stages)
        self._replicas = replicas
        self._ranks = board.ranks
        self._board = board
        self._group: dist.ProcessGroup | None = None

    def connect(self, group: dist.ProcessGroup) -> None:
        """Go by this group of all ranks, of gloo."""
        self._group = group

    def give(self, i: int, stage: int, norm: Tensor, buffer: Buffer, stream: Stream) -> None:
        """This stage's own norm of minibatch i; returns when all have given theirs."""
        super().give(i, stage, norm, buffer, stream)
        with stream.using(reads=(buffer,)):
            own = norm.to("cpu", torch.float64)
        gathered = [torch.empty((), dtype=torch.float64) for _ in range(self._ranks)]
        with self._board.blocked(None, _WHAT):
            try:
                dist.all_gather(gathered, own, group=self._group)
            except RuntimeError as error:  # which does not say whose connection has broken
                self._board.lost_one_of(range(self._ranks), _WHAT, error)
        for k in range(self._replicas.stages):
            if k != stage:
                found = gathered[self._replicas.ranks_of(k)[0]]
                super().give(i, k, found, Buffer(f"gradient norm of stage {k}"), stream)
