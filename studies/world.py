"""Connects the processes that train one comparison under torchrun, and tells things once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.logging import RichHandler
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from spectrain_ext.distributed import join_ranks
from spectrain_ext.distributed.board import Board
from spectrain_ext.distributed.store import Peers
from spectrain_ext.errors import CheckpointError, RankError, StageError
from spectrain_ext.schedule import Replicas

from .options import OptionError

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


# What the first process tells

_LOGGERS = ("spectrain_ext", "studies")
_logger = logging.getLogger(__name__)


class OnceToldCommand(click.Command):
    """A command that reports usage errors only on the first of several processes."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*args, **more)
        except click.UsageError as error:
            if World.of_environment().first:
                raise
            raise click.exceptions.Exit(error.exit_code) from error


@contextmanager
def joined(world: World, cuda: bool) -> Iterator[None]:
    """Enter ``world.joined`` and report its failures as failures of the command."""
    with ExitStack() as stack:
        try:
            stack.enter_context(world.joined(cuda))
        except OSError as error:
            raise click.ClickException(str(error)) from error
        try:
            yield
        except ConnectionError as error:  # from a rank that ended and reported why
            _logger.info("another process has ended: %s", error)
            raise click.exceptions.Exit(1) from error


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Make the block fail on all ranks or on none, and report every distinct reason once."""
    error: click.ClickException | None = None
    cause: Exception | None = None
    try:
        yield
    except OptionError as caught:
        error, cause = click.BadParameter(str(caught), param_hint=f"'--{caught.option}'"), caught
    except (ModuleNotFoundError, ValueError, OSError) as caught:
        error, cause = click.ClickException(str(caught)), caught
    except click.ClickException as caught:
        error = caught
    reasons = world.tell("" if error is None else error.format_message())
    if not any(reasons):
        return
    if error is None or reasons.index(reasons[world.rank]) != world.rank:
        raise click.exceptions.Exit(1 if error is None else error.exit_code)
    if len(set(reasons)) == 1:
        raise error from cause
    kind = click.UsageError if isinstance(error, click.UsageError) else click.ClickException
    raise kind(f"rank {world.rank}: {error.format_message()}") from cause


@contextmanager
def told(world: World, console: Console, folder: Path) -> Iterator[None]:
    """Report training failures of the block in readable form, on the right rank."""
    try:
        yield
    except (StageError, RankError, CheckpointError) as error:
        if _tells(world, error):
            raise click.ClickException(_in_words(error)) from error
        raise click.exceptions.Exit(1) from error
    except KeyboardInterrupt:
        kept = f"Finished runs are kept. To go on: the same again, with --out {folder}"
        console.print(kept)
        if world.first:
            raise
        raise click.exceptions.Exit(1) from None


def _tells(world: World, error: BaseException) -> bool:
    """Return whether this rank reports a failure: its own, or, on the lowest rank left, another's.

    The failed rank may have been killed, and torchrun may kill any other rank as soon as it ended.
    Together they report the failure once or twice.
    """
    if isinstance(error, CheckpointError):  # the same on all ranks
        return world.first
    if not isinstance(error, RankError):
        return True
    return world.rank == min(rank for rank in range(world.size) if rank != error.culprit)


def _in_words(error: StageError | RankError | CheckpointError) -> str:
    cause = error.__cause__
    if cause is None or not isinstance(error, StageError):  # other ranks hold the cause as text
        return str(error)
    return f"{error} ({type(cause).__name__}: {cause})"


@contextmanager
def logged(on: bool, console: Console, world: World) -> Iterator[None]:
    """Show the log inside the block: rank 0's around its progress bar, the others' on stderr."""
    if not on:
        yield
        return
    handler: logging.Handler
    if world.first:
        handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler()
        form = f"%(asctime)s rank {world.rank} %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(form))
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
