"""Emulates the operators' arithmetic exactly in numpy.

Every native result must be equal bit for bit (any NaN matches any NaN); nothing is approximate. A
float32 fma is a float64 product (exact: 24 + 24 bits fit in 53) and an error-free float64 sum,
rounded to odd and then to float32, which equals one rounding because 53 >= 2 * 24 + 2. A float64
fma is the three-term sum of Boldo and Melquiond (Emulation of FMA and correctly rounded sums, IEEE
TC 57, 2008), or rational arithmetic for exponents so extreme that an error-free transformation
would have errors. 16-bit tensors compute in float32 and round once, when stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
_INT_OF = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Knuth: s + e == a + b exactly, s the rounded sum."""
    s = a + b
    z = s - a
    return s, (a - (s - z)) + (b - z)


def _round_to_odd(s: Array, e: Array) -> Array:
    """Return s + e rounded to odd: s (rounded to nearest) or its neighbour on e's side."""
    even = (np.ascontiguousarray(s).view(np.int64) & 1) == 0
    move = even & (e != 0) & np.isfinite(s) & np.isfinite(e)
    return np.where(move, np.nextafter(s, np.where(e > 0, np.inf, -np.inf)), s)


def fma32(a: Array, b: Array, c: Array) -> Array:
    a, b, c = np.broadcast_arrays(a, b, c)
    assert a.dtype == b.dtype == c.dtype == np.float32
    with np.errstate(all="ignore"):
        s, e = _two_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
        return _round_to_odd(s, e).astype(np.float32)


def _split(a: Array) -> tuple[Array, Array]:
    """Veltkamp: two halves of at most 26 bits each."""
    t = a * 134217729.0
    high = t - (t - a)
    return high, a - high


def _fma_rational(a: float, b: float, c: float) -> float:
    """Return a * b + c of finite numbers in rational arithmetic: integer division rounds once."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:  # an exact zero has the sign of a float sum of an exact product's sign and c
        product_sign = np.copysign(1.0, a) * np.copysign(1.0, b)
        if a == 0 or b == 0:
            return float(np.copysign(0.0, product_sign) + c)
        return 0.0
    try:
        value = exact.numerator / exact.denominator
    except OverflowError:
        value = float("inf") if exact > 0 else float("-inf")
    return float(np.copysign(value, 1.0 if exact > 0 else -1.0))


def fma64(a: Array, b: Array, c: Array) -> Array:
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    a, b, c = np.broadcast_arrays(*np.atleast_1d(a, b, c))
    assert a.dtype == b.dtype == c.dtype == np.float64
    with np.errstate(all="ignore"):
        product = a * b
        (ah, al), (bh, bl) = _split(a), _split(b)
        error = ((ah * bh - product) + ah * bl + al * bh) + al * bl
        uh, ul = _two_sum(c, error)
        th, tl = _two_sum(product, uh)
        result = np.array(th + _round_to_odd(*_two_sum(tl, ul)))
        factors = np.isfinite(a) & np.isfinite(b)
        finite = factors & np.isfinite(c)
        # A product that would overflow is finite relative to an infinite c.
        result = np.where(finite, result, np.where(factors, c, product + c))

        def tame(x: Array) -> Array:
            return (np.abs(x) > 1e-100) & (np.abs(x) < 1e100)

        wild = finite & ~(tame(a) & tame(b) & (tame(c) | (c == 0)))
    for i in zip(*np.nonzero(wild), strict=True):
        result[i] = _fma_rational(float(a[i]), float(b[i]), float(c[i]))
    return result.reshape(shape)


def fma(a: Array | np.floating[Any], b: Array, c: Array) -> Array:
    scalar = np.asarray(a, dtype=b.dtype)
    return fma64(scalar, b, c) if b.dtype == np.float64 else fma32(scalar, b, c)


def widen(t: Tensor) -> Array:
    """Return the values in the compute type: float64 for float64, else float32."""
    t = t.detach().cpu()
    wide = t if t.dtype in (torch.float64, torch.float32) else t.float()
    return wide.contiguous().numpy().copy()


def narrow(x: Array, like: Tensor) -> Tensor:
    """Round to the type of ``like`` (to nearest, ties to even) with its strides."""
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return out.copy_(torch.from_numpy(np.ascontiguousarray(x)).to(like.dtype).reshape(like.shape))


def clone(t: Tensor) -> Tensor:
    """Return a copy of the bits with the same strides, on the CPU."""
    t = t.detach()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)


def predict(w: Tensor, v: Tensor, *, lr: float, steps: float) -> Tensor:
    """W - lr * steps * v as one fma, lr * steps in double; a zero product copies bits."""
    wide = widen(w)
    with np.errstate(over="ignore", under="ignore"):
        distance = np.asarray(lr * steps).astype(wide.dtype)
    if distance == 0:
        return clone(w)
    return narrow(fma(-distance, as_type(widen(v), wide), wide), w)


def as_type(x: Array, like: Array) -> Array:
    return x.astype(like.dtype, copy=False)


def scalars_like(x: Array) -> Callable[[float], Array]:
    """Return the conversion of a coefficient, formed in double, to the compute type."""

    def scalar(value: float) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(value).astype(x.dtype)

    return scalar


def shrink(wide: Array, by: float) -> Array:
    """(1 - by)*W, the factor formed in double; a factor of 1 keeps the bits."""
    factor = scalars_like(wide)(1.0 - by)
    return wide if factor == 1 else factor * wide


def direction(w: Tensor, g: Tensor, *, maximize: bool, l2: float) -> Array:
    """d = g, or -g, plus l2*W as one fma; without a penalty W is not read."""
    wide = widen(w)
    d = as_type(widen(g), wide)
    if maximize:
        d = -d
    penalty = scalars_like(wide)(l2)
    with np.errstate(all="ignore"):
        return fma(penalty, wide, d) if penalty else d


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD's hyperparameters, and its step in explicit fma arithmetic.

    Also has decoupled weight decay and a momentum of smoothed gradients.
    """

    lr: float
    momentum: float
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
    smoothed: bool = False

    def step(
        self, w: Tensor, g: Tensor | None, v: Tensor | None, *, first: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return new weights and momentum; a missing gradient leaves both unchanged."""
        if g is None:
            return clone(w), None if v is None else clone(v)
        wide = widen(w)
        scalar = scalars_like(wide)
        gain = 1.0 - self.momentum if self.smoothed else 1.0 - self.dampening
        with np.errstate(all="ignore"):
            d = self.direction(w, g)
            if self.decoupled_weight_decay:
                wide = shrink(wide, self.lr * self.weight_decay)
            new_v = None if v is None else clone(v)
            if self.momentum != 0:
                assert v is not None
                m = (
                    d
                    if first
                    else fma(scalar(self.momentum), as_type(widen(v), wide), scalar(gain) * d)
                )
                new_v = narrow(m, v)
                if self.nesterov:  # W - lr*gain*d - lr*momentum*v, rounded after each term
                    by_gradient = scalar(self.lr * gain)
                    wide = fma(-by_gradient, d, wide) if by_gradient else wide
                    return narrow(fma(scalar(-self.lr * self.momentum), m, wide), w), new_v
                d = m
            return narrow(fma(scalar(-self.lr), d, wide), w), new_v

    def direction(self, w: Tensor, g: Tensor) -> Array:
        """Return the gradient of the step, with its sign and the L2 penalty."""
        l2 = 0.0 if self.decoupled_weight_decay else self.weight_decay
        return direction(w, g, maximize=self.maximize, l2=l2)

    def keywords(self) -> dict[str, Any]:
        return dict(vars(self))


def bits(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().view(_INT_OF[t.dtype])


def assert_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that every bit is equal, NaN payloads too."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    differ = bits(actual) != bits(expected)
    if bool(differ.any()):
        _report(actual, expected, differ, what)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that every bit is equal, but any NaN matches any NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    a, e = actual.detach().cpu(), expected.detach().cpu()
    differ = (bits(a) != bits(e)) & ~(a.isnan() & e.isnan()).contiguous()
    if bool(differ.any()):
        _report(a, e, differ, what)


def _report(actual: Tensor, expected: Tensor, differ: Tensor, what: str) -> None:
    where = tuple(differ.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {int(differ.sum())} of {differ.numel()} elements of shape "
        f"{tuple(actual.shape)} {actual.dtype} differ, "
        f"first at {where}: {actual[where].item()!r} instead of {expected[where].item()!r}"
    )


def assert_lists(
    actual: Sequence[Tensor], expected: Sequence[Tensor], what: str, *, exact: bool = False
) -> None:
    """Compare element by element, with the index in the message."""
    assert len(actual) == len(expected), what
    check = assert_bits if exact else assert_same
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        check(a, e, f"{what}[{i}]")


def ulp(x: Tensor) -> Tensor:
    """The distance from abs(x), in float64, to the next float32 number: its last place."""
    single = x.abs().to(torch.float32)
    return torch.nextafter(single, torch.full_like(single, torch.inf)).double() - single.double()
