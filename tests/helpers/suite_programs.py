"""Programs of ranks in the tests of the GPU suite; ``gpu.launch`` imports it in each rank."""

from __future__ import annotations

import os
import time


def hangs(rank: int, ranks: int, scale: object, culprit: int) -> None:
    if rank == culprit:
        time.sleep(1000)


def told(rank: int, ranks: int, scale: object) -> tuple[str, int]:
    """Return a variable of the rank's environment, and the rank."""
    return os.environ["TOLD"], rank
