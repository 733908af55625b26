"""A program of ranks in the tests of the GPU suite; ``gpu.launch`` imports it in each rank."""

from __future__ import annotations

import time


def hangs(rank: int, ranks: int, scale: object, culprit: int) -> str:
    if rank == culprit:
        time.sleep(1000)
    return f"rank {rank} of {ranks}"
