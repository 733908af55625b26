"""Plain copies that move the minimum bytes of an operation, as its yardstick."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain_ext.operators.plan import Plan

from .operations import Call

#: Larger copies are not faster: both sides exceed every cache.
LIMIT = 2**30


def pair(elements: int, device: str) -> tuple[Tensor, Tensor]:
    """Return source and target of a copy, both written, so that both use physical memory."""
    source = torch.zeros(elements, device=device).add_(1.0)
    return source, torch.zeros_like(source).add_(2.0)


def copied_bytes(nbytes: int) -> int:
    """Return the bytes that copies in place of `nbytes` read and write."""
    return 8 * max(1, min(nbytes, LIMIT) // 8)


def copies(nbytes: int, device: str = "cpu") -> dict[str, Call]:
    """Return several copies that move `copied_bytes`."""
    elements = copied_bytes(nbytes) // 8
    a, b = pair(elements, device)
    calls: dict[str, Call] = {
        "copy: Tensor.copy_": lambda: b.copy_(a),
        "copy: Plan.stash": Plan(a, stashed=b).stash,
    }
    if device == "cpu":
        source, target = a.numpy(), b.numpy()

        def numpy_copy() -> None:
            target[...] = source

        calls["copy: numpy"] = numpy_copy
    else:
        from_, to = a.split(-(-elements // 2)), b.split(-(-elements // 2))
        calls["copy: two halves"] = lambda: torch._foreach_copy_(to, from_)
    return calls
