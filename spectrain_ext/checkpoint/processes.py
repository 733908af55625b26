"""Processes: what those of a process group tell one another about a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from spectrain_ext.distributed.exchange import exchange
from spectrain_ext.distributed.pipeline import DistributedPipeline
from spectrain_ext.errors import CheckpointError

T = TypeVar("T")

_watched: DistributedPipeline | None = None  # whose ranks do something together just now


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank and how many there are; 0 of 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gathered(make: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Return what ``make`` returns in every process, by rank: JSON's types.

    Where it raises in one process it raises in all, so that none waits for the others.
    """

    def watched() -> T:
        with nullcontext() if _watched is None else _watched.busy("its part of a checkpoint"):
            return make()

    error, found = _told(watched, group)
    if error is not None:
        raise error
    for rank, answer in enumerate(found):
        if "error" in answer:
            raise RuntimeError(f"process {rank}: {answer['error']}")
    return [answer["value"] for answer in found]


def settled(make: Callable[[], T], group: dist.ProcessGroup | None, what: str) -> list[T]:
    """The same for what has failed in all processes where it has failed in one.

    A thread beside the one that trains may call it.

    Raises:
        CheckpointError: in all processes with the same message: that of the first one, or ``what``
            was done, and every process that failed with its reason.
    """
    error, found = _told(make, group)
    reasons = {rank: answer for rank, answer in enumerate(found) if "error" in answer}
    if reasons:
        told = next(iter(reasons.values()))["message"]
        if told is None:
            listed = (f"process {rank}: {answer['error']}" for rank, answer in reasons.items())
            told = f"{what}: {'; '.join(listed)}"
        raise CheckpointError(told) from error
    return [answer["value"] for answer in found]


def _told(
    make: Callable[[], T], group: dist.ProcessGroup | None
) -> tuple[Exception | None, list[dict[str, Any]]]:
    """What failed here, and what every process says: what it has made, or why it has not."""
    error = None
    try:
        text = json.dumps({"value": make()})
    except Exception as caught:
        error = caught
        message = str(error) if isinstance(error, CheckpointError) else None
        text = json.dumps({"error": f"{type(error).__name__}: {error}", "message": message})
    _, size = rank_and_size(group)
    try:
        texts = [text] if size == 1 else exchange(text, group)
    except RuntimeError as lost:
        raise ConnectionError(f"the processes have lost one another: {lost}") from lost
    return error, [json.loads(text) for text in texts]


@contextmanager
def together(target: nn.Module, what: str) -> Iterator[None]:
    """Inside, the ranks of a pipeline watch each other: none waits past its deadline."""
    global _watched
    if not isinstance(target, DistributedPipeline):
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
    if isinstance(target, DistributedPipeline):
        return lambda: target.busy(what)
    return nullcontext


def patience(target: nn.Module) -> timedelta | None:
    """Return how long a rank waits for another, None: as long as torch says."""
    return timedelta(seconds=target.timeout) if isinstance(target, DistributedPipeline) else None
