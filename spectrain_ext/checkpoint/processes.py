"""Processes: what those of a process group tell one another about a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


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
        made = make()
    except Exception as caught:
        error = caught
    found: list[tuple[T | None, str | None]] = [(None, None)] * size
    told = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(found, (made, told), group)
    if error is not None:
        raise error
    for rank, (_, reason) in enumerate(found):
        if reason is not None:
            raise RuntimeError(f"process {rank}: {reason}")
    return [value for value, _ in found]  # type: ignore[misc]
