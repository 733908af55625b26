"""What ranks of the suite for GPUs run in its tests: ``gpu.launch`` imports it in each."""

from __future__ import annotations

import os
import time


def hangs(rank: int, ranks: int, scale: object, culprit: int) -> None:
    if rank == culprit:
        time.sleep(1000)


def told(rank: int, ranks: int, scale: object) -> tuple[str, int]:
    """What it finds in its environment, and which rank it is."""
    return os.environ["TOLD"], rank
