"""Programs of ranks in the tests of the GPU suite; ``gpu.launch`` imports it in each rank."""

from __future__ import annotations

import time


def hangs(rank: int, ranks: int, scale: object, culprit: int) -> None:
    if rank == culprit:
        time.sleep(1000)


def told(rank: int, ranks: int, scale: object) -> int:
    return rank
