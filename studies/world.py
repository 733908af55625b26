"""World: the processes that train one comparison together, as torchrun started them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from spectrain_ext.distributed import join_ranks
from spectrain_ext.distributed.board import Board
from spectrain_ext.distributed.exchange import Peers
from spectrain_ext.schedule import Replicas

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How long ranks wait for what another does before training, such as decoding 60,000 images.
_PATIENCE = timedelta(hours=1)
# And, with a board, for a rank that does not get on with what it does alone.
_STUCK = 300.0


def _to_nobody(*what: object) -> None:
    """Nobody waits."""


class World:
    """One process of those that train together; alone, it is rank 0 of 1.

    Args:
        rank: of this process.
        size: how many processes there are.
        local_rank: this process's number on its machine.
        tell_others: told what it does, where it works alone and others wait.

    Attributes:
        rank, size, local_rank, tell_others: as given.
        replicas: which stage every process trains; one each, until ``settle`` says otherwise.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        tell_others: Callable[..., None] = _to_nobody,
    ) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.replicas = Replicas((1,) * size)
        self.tell_others = tell_others
        self._board: Board | None = None

    @staticmethod
    def of_environment(environment: Mapping[str, str] = os.environ) -> World:
        """What torchrun says; without it, and with one process, this process alone."""
        if any(name not in environment for name in _VARIABLES):
            return World()
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if size == 1:
            return World()
        return World(rank, size, int(environment.get("LOCAL_RANK", rank)))

    @property
    def together(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1

    @property
    def first(self) -> bool:
        """Whether this is the process that talks and writes."""
        return self.rank == 0

    @property
    def stage(self) -> int:
        """The stage that this process trains."""
        return self.replicas.stage_and_replica(self.rank)[0]

    def device(self, name: str) -> str:
        """The device of this process that a name means: cuda is the one of its local rank."""
        if name != "cuda" or not self.together:
            return name
        there = torch.cuda.device_count()
        return f"cuda:{self.local_rank % there if there else self.local_rank}"

    @contextmanager
    def joined(self, cuda: bool) -> Iterator[None]:
        """Inside there is a process group of all ranks, of gloo: pipelines make those of NCCL.

        Args:
            cuda: whether its ranks use the GPU of their number.
        """
        if not self.together:
            yield
            return
        if cuda and torch.cuda.is_available():
            torch.cuda.set_device(self.device("cuda"))
        self._join()
        yield
        # Not after a failure: what is in flight would be waited for.
        dist.destroy_process_group()

    def _join(self) -> None:
        join_ranks(timeout=_PATIENCE)
        store = PrefixStore("studies", _get_default_store())
        self._board = Board(store, self.rank, self.size, _STUCK)
        with self._board.run(starts=True):  # until all have come
            pass

    def renew(self) -> None:
        """Leave all groups and make a new one: those of an earlier pipeline hold their sockets.

        A pipeline of four ranks leaves 16 open files and 10 threads in each of the middle ones.
        """
        if self.together:
            dist.destroy_process_group()
            self._join()

    @contextmanager
    def alone(self, what: str) -> Iterator[Callable[..., None]]:
        """Inside, rank 0 works and the others, which have nothing to do there, wait for it.

        Yields:
            What rank 0 calls with what it does next, a few words: as long as it gets on it is
            waited for.

        Raises:
            RankError: a rank has gone, or rank 0 does not get on.
        """
        if self._board is None:
            yield self.tell_others
            return
        with self._board.together(what):
            if not self.first:
                yield _to_nobody
                return
            with self._board.busy(what):
                yield self._board.set_action

    @contextmanager
    def part(self, all_ranks: bool, what: str) -> Iterator[World | None]:
        """Inside, the processes that this one works with: all, or rank 0 by itself.

        Yields:
            None on a rank that has no part in it, and waits.

        Raises:
            RankError: as ``alone``.
        """
        if all_ranks:
            yield self
            return
        with self.alone(what) as told:
            yield World(tell_others=told) if self.first else None

    def tell(self, value: Any) -> list[Any]:
        """Return what every rank gives, by rank: JSON's types.

        Raises:
            ConnectionError: a rank has gone.
        """
        return Peers().all_gather(value) if self.together else [value]

    def collect(self, stages: list[nn.Module]) -> None:
        """Give rank 0, which has all stages as they were made, the state that each rank trained.

        Args:
            stages: on every rank its own one is the trained one.
        """
        if self._board is None:
            return
        with self._board.together("collecting the stages"):
            try:
                for k in range(1, self.replicas.stages):
                    self._collect(k, stages[k], self._board)
            except RuntimeError as error:  # of gloo: who is missed here has gone
                raise ConnectionError(str(error)) from error

    def _collect(self, k: int, stage: nn.Module, board: Board) -> None:
        source = self.replicas.ranks_of(k)[0]  # replicas have the same parameters
        for name, tensor in stage.state_dict().items():
            if self.rank == source:
                board.set_action("sending", name, "of stage", k)
                dist.send(tensor.detach().cpu().contiguous(), 0)
            elif self.first:
                board.set_action("receiving", name, "of stage", k)
                received = torch.empty(tensor.shape, dtype=tensor.dtype)
                dist.recv(received, source)
                with torch.no_grad():
                    tensor.copy_(received)
