"""Sends as between GPUs on a machine without: inner, because only devices choose these ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from spectrain_ext.distributed import board, links, ranks, store

WAYS = ("direct", "staged", "apart")


@contextmanager
def travelling(way: str) -> Iterator[None]:
    """Make pipelines that send in one of these ways.

    - staged: through copies in CPU memory, as between stages on one GPU.
    - apart: bodies by groups of their own, as with NCCL.
    """

    def staged(*given: Any) -> links.Links:
        made = real(*given)
        return made._replace(edges=[link._replace(staged=True) for link in made.edges])

    def new_group(ranks: Any, timeout: Any, backend: str, **_: Any) -> Any:
        return group(ranks, timeout, "gloo")

    real, group = links.open_links, dist.new_group
    with ExitStack() as changed:
        if way == "staged":
            changed.enter_context(patch.object(ranks, "open_links", staged))
        if way == "apart":
            changed.enter_context(patch.object(dist, "new_group", new_group))
            changed.enter_context(patch.object(ranks, "backend_of_bodies", lambda *_: "nccl"))
        yield


@contextmanager
def hurried() -> Iterator[None]:
    """Wait 5 s instead of 15 for ranks that do not come."""
    with patch.object(board, "CONNECT_SECONDS", 5.0):
        yield


@contextmanager
def hidden() -> Iterator[None]:
    """Take the loopback address for one that leads elsewhere from other machines."""
    with patch.object(store, "_LOCAL", frozenset()):
        yield
