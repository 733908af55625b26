"""What a program of ranks does to itself to fail, and the cuts of models that ranks agree on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import spectrain_ext as st


def commit(fault: str) -> None:
    """Commit a fault; one that begins with "/" is a pipe, whose reader notices the hang."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        os._exit(7)
    if fault == "exception":
        raise ArithmeticError("planned")
    if fault == "hang":
        threading.Event().wait()
    if fault.startswith("/"):
        with open(fault, "w"):
            threading.Event().wait()


def partitions(rank: int, ranks: int, blocks: Sequence[int]) -> Any:
    """Return every rank's cut; each was slow at another block."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(blocks[rank])))

    def lingers(*_: object) -> None:
        torch.linalg.svd(torch.rand(300, 300))

    model[2 * rank].register_forward_pre_hook(lingers)
    try:
        parts = st.partition(model, 3, torch.randn(4, 8))
    except ValueError as error:
        return str(error)
    return parts.cut.ends, [block.seconds for block in parts.profile.blocks]
