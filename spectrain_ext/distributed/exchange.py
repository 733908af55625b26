"""exchange: what the processes of a group tell one another, as text."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return what every process of a group gives, by rank.

    Callers write and read JSON: torch's object collectives unpickle what arrives, and so execute
    whatever it says.

    Args:
        text: this process's.
        group: all of them, with a CPU backend; None: the default group.

    Raises:
        RuntimeError: of torch, a process has gone.
    """
    count = dist.get_world_size(group)
    mine = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    longest = max(1, *(int(size) for size in sizes))
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(found, _padded(mine, longest), group=group)
    return [
        body[: int(size)].numpy().tobytes().decode()
        for body, size in zip(found, sizes, strict=True)
    ]


def _padded(text: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(text.ljust(size, b"\0")), dtype=torch.uint8)
