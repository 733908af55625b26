"""The yardstick: plain copies that move as many bytes as an operation has to."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain_ext.operators.plan import Plan

from .operations import Call

#: Larger copies move no faster: both sides are beyond every cache.
LIMIT = 2**30


def pair(elements: int, device: str) -> tuple[Tensor, Tensor]:
    """What is copied, and where to; both are written, so that both are real memory."""
    source = torch.zeros(elements, device=device).add_(1.0)
    return source, torch.zeros_like(source).add_(2.0)


def copies(nbytes: int, device: str = "cpu") -> tuple[int, dict[str, Call]]:
    """Several copies that move about `nbytes` (read and written): the bytes they do move, calls."""
    elements = max(1, min(nbytes, LIMIT) // 8)
    a, b = pair(elements, device)
    half = elements // 2
    plan = Plan(a, stashed=b)
    calls: dict[str, Call] = {
        "copy: Tensor.copy_": lambda: b.copy_(a),
        "copy: two halves": lambda: torch._foreach_copy_(
            [b[:half], b[half:]], [a[:half], a[half:]]
        ),
        "copy: Plan.stash": plan.stash,
    }
    if device == "cpu":
        source, target = a.numpy(), b.numpy()

        def numpy_copy() -> None:
            target[...] = source

        calls["copy: numpy"] = numpy_copy
        del calls["copy: two halves"]
    return 8 * elements, calls
