"""Computes gradient norms, and exchanges those of all stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from spectrain_ext.transport import Buffer, Point, Stream


class Clipping(NamedTuple):
    max_norm: float | None  # the largest gradient norm; None: no clipping
    globally: bool  # whether that of all stages' gradients


def gradient_norm(params: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients, 0-d, in float32 or wider; one launch per dtype."""
    gradients = [p.grad for p in params if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=device)
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        alike = [g for g in gradients if g.dtype == dtype]
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        norms += torch._foreach_norm(alike, 2, dtype=wide)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


class GlobalNorm:
    """The norm of a minibatch's gradient over all stages: each stage gives its own and waits.

    With it goes a number that passes tell, of which all stages get the largest. Only for schedules
    that flush: no stage gives its next norm before all have used this one.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._minibatch: int | None = None
        self._given: dict[int, tuple[Tensor, Buffer, Point]] = {}

    def give(self, i: int, stage: int, norm: Tensor, buffer: Buffer, stream: Stream) -> None:
        """Give a stage's own norm of minibatch i and its number, float64 [2], of a stream."""
        if i != self._minibatch:  # all streams have used the last one's
            self._minibatch = i
            self._given = {}
        # Here: the stage may update before another one takes the norm.
        self._given[stage] = norm, buffer, stream.mark()

    def has(self, stages: Iterable[int]) -> bool:
        """Whether these stages have given theirs for the current minibatch."""
        return all(stage in self._given for stage in stages)

    def __len__(self) -> int:
        """Return 0 until it is complete."""
        return int(len(self._given) == self._stages)

    def take(self, i: int, stream: Stream, device: torch.device) -> Tensor:
        """Return the norm over all stages, computed on one stage's stream."""
        of_stages = self._taken(i, stream, device)
        with stream.using():
            total: Tensor = torch.linalg.vector_norm(of_stages[:, 0])
        return total

    def told(self, i: int, stream: Stream, device: torch.device) -> float:
        """Return the largest number of all stages. Synchronizes."""
        of_stages = self._taken(i, stream, device)
        with stream.using():
            return float(of_stages[:, 1].amax())

    def _taken(self, i: int, stream: Stream, device: torch.device) -> Tensor:
        assert i == self._minibatch and len(self), "not complete"
        # Sorted, so that the bits do not depend on the order.
        of_stages = [self._given[stage] for stage in sorted(self._given)]
        for _, _, written in of_stages:
            stream.wait(written)
        with stream.using(reads=[buffer for _, buffer, _ in of_stages]):
            norms = [norm.to(device, torch.float64, non_blocking=True) for norm, *_ in of_stages]
            return torch.stack(norms)

    def reset(self) -> None:
        self._minibatch = None
        self._given = {}
