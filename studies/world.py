"""Connects the processes that train one comparison under torchrun."""

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
# Limit of the ranks' wait for each other before training, for example to decode 60,000 images.
_PATIENCE = timedelta(hours=1)
# With a board, also the limit for a rank that makes no progress in its own work.
_STUCK = 300.0


def _to_nobody(*what: object) -> None:
    """Do nothing: no rank waits."""


class World:
    """One of the processes that train together; a single process is rank 0 of 1.

    Attributes:
        rank, size, local_rank, tell_others: as given.
        replicas: the stage that every process trains; one process per stage until ``settle``
            changes it.
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
        """Return the world of torchrun's variables, or of this process alone."""
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
        """Whether this process writes files and output."""
        return self.rank == 0

    @property
    def stage(self) -> int:
        """The stage that this process trains."""
        return self.replicas.stage_and_replica(self.rank)[0]

    def device(self, name: str) -> str:
        """Return the device of a name in this process; cuda is the device of the local rank."""
        if name != "cuda" or not self.together:
            return name
        there = torch.cuda.device_count()
        return f"cuda:{self.local_rank % there if there else self.local_rank}"

    @contextmanager
    def joined(self, cuda: bool) -> Iterator[None]:
        """Provide a gloo process group of all ranks; pipelines make the NCCL groups."""
        if not self.together:
            yield
            return
        if cuda and torch.cuda.is_available():
            torch.cuda.set_device(self.device("cuda"))
        self._join()
        yield
        # Not after a failure: it would wait for messages in flight.
        dist.destroy_process_group()

    def _join(self) -> None:
        join_ranks(timeout=_PATIENCE)
        store = PrefixStore("studies", _get_default_store())
        self._board = Board(store, self.rank, self.size, _STUCK)
        with self._board.run(starts=True):  # until all have arrived
            pass

    def renew(self) -> None:
        """Leave all groups and make a new one: groups of earlier pipelines hold their sockets.

        A pipeline of four ranks leaves 16 open files and 10 threads in each middle rank.
        """
        if self.together:
            dist.destroy_process_group()
            self._join()

    @contextmanager
    def alone(self, what: str) -> Iterator[Callable[..., None]]:
        """Let rank 0 work while the other ranks wait for it."""
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
        """Provide the processes that work on the block: all of them, or rank 0 alone."""
        if all_ranks:
            yield self
            return
        with self.alone(what) as told:
            yield World(tell_others=told) if self.first else None

    def tell(self, value: Any) -> list[Any]:
        """Return every rank's value (JSON types), by rank."""
        return Peers().all_gather(value) if self.together else [value]

    def collect(self, stages: list[nn.Module]) -> None:
        """Send every rank's trained state to rank 0."""
        if self._board is None:
            return
        with self._board.together("collecting the stages"):
            try:
                for k in range(1, self.replicas.stages):
                    self._collect(k, stages[k], self._board)
            except RuntimeError as error:  # from gloo: the missing rank has ended
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
