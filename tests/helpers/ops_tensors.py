"""Builds lists of tensors for the operator tests: any layout and bits, between guard bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from helpers.ops_reference import INTS
from torch import Tensor

_GUARD = 0xFF  # bytes around the tensors; such bits are NaN
_LINE = 64  # bytes of alignment of an allocation
_SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0]
KINDS = ("normal", "wide", "special", "bits")
#: How the tensors of a list lie in memory.
LAYOUTS = (
    "apart",  # each at a multiple of 64 bytes
    "offset",  # each behind such a multiple by as many elements as in all other lists
    "shifted",  # each by another number of elements in each list, so that vectors never align
    "channels last",
    "permuted",
    "adjacent",  # one after the other without a gap: neighbours can merge
    "nearly adjacent",  # with gaps of a few elements
    "backwards",  # adjacent, the first tensor at the end
)


def values(rng: np.random.Generator, kind: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of numbers of a kind.

    "wide" has all exponents, "special" zeros, infinities, NaN and the type's ends, and "bits" every
    bit pattern alike: NaN with payloads, subnormals.
    """
    if kind == "bits":
        info = torch.iinfo(INTS[dtype])
        raw = rng.integers(info.min, info.max, size=count, dtype=np.int64, endpoint=True)
        return torch.from_numpy(raw).to(INTS[dtype]).view(dtype)
    x = rng.standard_normal(count)
    limits = torch.finfo(dtype)
    if kind == "wide":
        with np.errstate(over="ignore"):
            low, high = math.log2(limits.tiny) - 4, math.log2(limits.max)
            x *= np.exp2(rng.uniform(low, high, count))
    t = torch.from_numpy(x).to(dtype)
    if kind == "special":
        ends = [limits.eps, limits.max, limits.min, limits.tiny, -limits.tiny, limits.tiny / 2]
        special = torch.tensor(
            [*_SPECIAL, *ends, limits.tiny * limits.eps], dtype=torch.float64
        ).to(dtype)
        which = torch.from_numpy(rng.integers(0, len(special), count))
        t = torch.where(torch.from_numpy(rng.random(count) < 0.5), special[which], t)
    return t


def shape_of(count: int, layout: str) -> tuple[int, ...]:
    """Return a shape of about `count` elements; the layouts with an order have four dimensions."""
    if layout not in ("channels last", "permuted"):
        return (count,)
    return (2, 3, count // 6, 1) if count >= 6 else (1, count, 1, 1)


def _strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    order = {"channels last": (0, 2, 3, 1), "permuted": (3, 1, 0, 2)}.get(layout, range(len(shape)))
    strides, width = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = width
        width *= max(1, shape[d])
    return tuple(strides)


class GuardedList:
    """A list of tensors in one buffer of guard bytes, each with a version counter of its own."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        layout: str,
        *,
        shift: Sequence[int],
        device: str = "cpu",
    ) -> None:
        """Where there are gaps, `shift` has the elements from an aligned address to each one."""
        starts = [0] * len(shapes)
        end = _LINE
        numbers = list(range(len(shapes)))
        for i in reversed(numbers) if layout == "backwards" else numbers:
            size = dtypes[i].itemsize
            aligned = -(-end // _LINE) * _LINE + _LINE
            if layout in ("offset", "shifted"):
                starts[i] = aligned + shift[i] * size
            elif layout in ("adjacent", "backwards"):
                starts[i] = -(-end // size) * size
            elif layout == "nearly adjacent":
                starts[i] = -(-end // size) * size + (shift[i] % 3 + 1) * size
            else:
                starts[i] = aligned
            end = starts[i] + math.prod(shapes[i]) * size
        self.buffer = torch.empty(end + _LINE, dtype=torch.uint8, device=device).fill_(_GUARD)
        self._spans = [
            (start, start + math.prod(shape) * dtype.itemsize, dtype)
            for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
        ]
        self.flat = self.views(self.buffer)
        self.tensors = [
            flat.as_strided(shape, _strides(shape, layout)).data
            for flat, shape in zip(self.flat, shapes, strict=True)
        ]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the elements of all tensors in a copy of the buffer, in the order of memory."""
        return [buffer[start:stop].view(dtype) for start, stop, dtype in self._spans]

    def fill(self, rng: np.random.Generator, kind: str, *, positive: bool = False) -> None:
        for flat in self.flat:
            numbers = values(rng, kind, flat.numel(), flat.dtype)
            flat.copy_(numbers.abs() if positive else numbers)

    def check_guards(self, what: str) -> None:
        """Fail if a byte outside the tensors changed."""
        inside = torch.zeros(self.buffer.numel(), dtype=torch.bool)
        for start, stop, _ in self._spans:
            inside[start:stop] = True
        where = ((self.buffer.cpu() != _GUARD) & ~inside).nonzero().flatten().tolist()
        assert not where, f"{what}: bytes {where[:8]} outside the tensors were overwritten"


def versions(tensors: Sequence[Tensor]) -> list[int]:
    return [t._version for t in tensors]
