"""Builds tensors for the operator tests: any dense layout and bits, with guard bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as hs
import numpy as np
import torch
from torch import Tensor

#: (weights, momentum): the supported combinations.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]
#: Sizes around the widths of vectors (4 to 64 elements) and of unrolled loops.
SIZES = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    255,
    257,
    511,
    513,
    1025,
]
#: Kinds of numbers; "bits" draws every bit pattern alike: NaN with payloads, infinities,
#: subnormals.
KINDS = ["normal", "wide", "special", "bits"]
_SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0]
_GUARD = 64  # elements on either side
_NP_INT = {
    torch.float64: np.int64,
    torch.float32: np.int32,
    torch.float16: np.int16,
    torch.bfloat16: np.int16,
}


@dataclass(frozen=True)
class Layout:
    """A dense layout: shape, order of the dimensions in memory (slowest first), offset."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        strides = [0] * len(self.shape)
        step = 1
        for d in reversed(self.order):
            strides[d] = step
            step *= max(1, self.shape[d])
        return tuple(strides)

    def at(self, offset: int) -> Layout:
        """Return the same layout at another offset."""
        return Layout(self.shape, self.order, offset)


def contiguous(*shape: int) -> Layout:
    return Layout(shape, tuple(range(len(shape))))


def channels_last(n: int, c: int, h: int, w: int) -> Layout:
    return Layout((n, c, h, w), (0, 2, 3, 1))


class Guarded:
    """A tensor in a larger buffer of 0xFF bytes (NaN); ``check`` verifies the surrounding bytes."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, *, device: str | torch.device = "cpu"
    ) -> None:
        self._start = _GUARD + layout.offset
        self._end = self._start + layout.numel
        self.buffer = torch.empty(self._end + _GUARD, dtype=dtype, device=device)
        self.buffer.view(torch.uint8).fill_(0xFF)
        self.tensor = self.buffer.as_strided(layout.shape, layout.strides, self._start)

    def filled(self, values: Tensor) -> Guarded:
        """Copy values (a flat tensor in memory order) into the tensor, bit for bit."""
        self.flat.copy_(values)
        return self

    @property
    def flat(self) -> Tensor:
        """Return the elements in memory order."""
        return self.buffer[self._start : self._end]

    def check(self, what: str) -> None:
        """Fail if a byte before or after the tensor changed."""
        for name, part in (
            ("before", self.buffer[: self._start]),
            ("after", self.buffer[self._end :]),
        ):
            changed = (part.view(torch.uint8) != 0xFF).nonzero()
            assert changed.numel() == 0, (
                f"{what}: bytes {changed.flatten().tolist()[:8]} {name} the tensor were overwritten"
            )


def values(rng: np.random.Generator, kind: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of ``count`` numbers of a kind."""
    if kind == "bits":
        info = np.iinfo(_NP_INT[dtype])
        raw = rng.integers(info.min, info.max, size=count, dtype=_NP_INT[dtype], endpoint=True)
        return torch.from_numpy(raw).view(dtype)
    x = rng.standard_normal(count)
    if kind == "wide":  # exponents from one end of the type to the other
        info16 = torch.finfo(dtype)
        low, high = math.log2(info16.tiny) - 4, math.log2(info16.max)
        with np.errstate(over="ignore"):
            x *= np.exp2(rng.uniform(low, high, count))
    t = torch.from_numpy(x).to(dtype)
    if kind == "special" and count:
        info = torch.finfo(dtype)
        ends = [info.eps, info.max, info.min, info.tiny, -info.tiny, info.tiny / 2]
        special = torch.tensor([*_SPECIAL, *ends, info.tiny * info.eps], dtype=torch.float64)
        special = special.to(dtype)
        which = torch.from_numpy(rng.integers(0, len(special), count))
        t = torch.where(torch.from_numpy(rng.random(count) < 0.5), special[which], t)
    return t


@dataclass(frozen=True)
class Spec:
    """One row of a list: its layout, its types, and each stream's offset."""

    layout: Layout
    dtype: torch.dtype
    momentum_dtype: torch.dtype
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A list of tensors to build, or one; ``stream`` builds such lists."""

    rows: tuple[Spec, ...]
    single: bool
    kind: str
    seed: int

    def stream(
        self, index: int, *, momentum: bool = False, kind: str | None = None
    ) -> list[Guarded]:
        """Return the guarded tensors of one list; each index has its own values and offsets."""
        rng = np.random.default_rng([self.seed, index])
        out = []
        for row in self.rows:
            dtype = row.momentum_dtype if momentum else row.dtype
            layout = row.layout.at(row.offsets[index % len(row.offsets)])
            out.append(
                Guarded(layout, dtype).filled(values(rng, kind or self.kind, layout.numel, dtype))
            )
        return out

    def given(self, stream: Sequence[Guarded]) -> list[Tensor] | Tensor:
        """Return the argument to pass: a list, or the one tensor."""
        return stream[0].tensor if self.single else [g.tensor for g in stream]


def tensors(stream: Sequence[Guarded]) -> list[Tensor]:
    return [g.tensor for g in stream]


def check_guards(**streams: Sequence[Guarded]) -> None:
    for name, stream in streams.items():
        for i, guarded in enumerate(stream):
            guarded.check(f"{name}[{i}]")


def as_list(result: object) -> list[Tensor]:
    """Return an operator's result as a list: one input tensor gives one output tensor."""
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, (list, tuple))
    return list(result)


@hs.composite
def layouts(draw: hs.DrawFn) -> Layout:
    """Dense layouts of 0 to 4 dimensions: row-major, permuted, channels_last."""
    if draw(hs.booleans()):
        return contiguous(draw(hs.sampled_from(SIZES)))
    shape = tuple(draw(hs.lists(hs.integers(0, 7), min_size=0, max_size=4)))
    order = draw(hs.permutations(range(len(shape))))
    return Layout(shape, tuple(order))


@hs.composite
def cases(
    draw: hs.DrawFn, *, min_size: int = 0, max_size: int = 5, single: bool | None = None
) -> Case:
    """Lists of any mixture of layouts, types and alignments, or a single tensor."""
    one = draw(hs.booleans()) if single is None else single
    rows = draw(
        hs.lists(
            hs.builds(
                lambda layout, dtypes, offsets: Spec(layout, *dtypes, tuple(offsets)),
                layouts(),
                hs.sampled_from(DTYPES),
                # Streams with a common alignment use other code paths than streams without one.
                hs.one_of(hs.just([0]), hs.lists(hs.integers(0, 17), min_size=1, max_size=4)),
            ),
            min_size=1 if one else min_size,
            max_size=1 if one else max_size,
        )
    )
    return Case(tuple(rows), one, draw(hs.sampled_from(KINDS)), draw(hs.integers(0, 2**32 - 1)))


def rates() -> hs.SearchStrategy[float]:
    """Learning rates: ordinary ones, zero, and extreme ones."""
    return hs.one_of(hs.sampled_from([0.0, 0.1, 0.05, 1.0, 1e-30, 3e38]), hs.floats(0, 10))


def horizons() -> hs.SearchStrategy[float]:
    """Horizons: whole and fractional, including zero."""
    return hs.one_of(hs.sampled_from([0.0, 1.0, 2.0, 7.0, 0.5]), hs.floats(0, 50))
