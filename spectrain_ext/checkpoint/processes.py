"""Processes: what those of a process group tell one another about a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from spectrain_ext.errors import CheckpointError
from spectrain_ext.rank_pipeline import RankPipeline

T = TypeVar("T")

_watched: RankPipeline | None = None  # whose ranks do something together just now


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank and how many there are; 0 of 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gathered(make: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Return what ``make`` returns in every process, by rank.

    Where it raises in one process it raises in all, so that none waits for the others.
    """
    _, size = rank_and_size(group)
    if size == 1:
        return [make()]
    error: Exception | None = None
    made: T | None = None
    try:
        with nullcontext() if _watched is None else _watched.busy("its part of a checkpoint"):
            made = make()
    except Exception as caught:
        error = caught
    found: list[tuple[T | None, str | None]] = [(None, None)] * size
    told = None if error is None else f"{type(error).__name__}: {error}"
    with connected(size):
        dist.all_gather_object(found, (made, told), group)
    if error is not None:
        raise error
    for rank, (_, reason) in enumerate(found):
        if reason is not None:
            raise RuntimeError(f"process {rank}: {reason}")
    return [value for value, _ in found]  # type: ignore[misc]


@contextmanager
def connected(size: int) -> Iterator[None]:
    """Inside, a RuntimeError of a group of processes becomes a ConnectionError.

    What fails in a process itself has been told to all others by then, as another exception.
    """
    try:
        yield
    except CheckpointError:
        raise
    except RuntimeError as error:
        if size == 1:
            raise
        raise ConnectionError(f"the processes have lost one another: {error}") from error


@contextmanager
def together(target: nn.Module, what: str) -> Iterator[None]:
    """Inside, the ranks of a pipeline watch each other: none waits past its deadline."""
    global _watched
    if not isinstance(target, RankPipeline):
        yield
        return
    with target.together(what):
        _watched = target
        try:
            yield
        finally:
            _watched = None


def busy(target: nn.Module, what: str) -> Callable[[], AbstractContextManager[None]]:
    """Make what says that this rank is at work while the others wait for it."""
    if isinstance(target, RankPipeline):
        return lambda: target.busy(what)
    return nullcontext


def patience(target: nn.Module) -> timedelta | None:
    """Return how long a rank waits for another, None: as long as torch says."""
    return timedelta(seconds=target.timeout) if isinstance(target, RankPipeline) else None
