"""Emulates the operators' arithmetic exactly in numpy.

Every native result must be equal bit for bit (any NaN matches any NaN); nothing is approximate. A
float32 fma is a float64 product (exact: 24 + 24 bits fit in 53) and an error-free float64 sum,
rounded to odd and then to float32, which equals one rounding because 53 >= 2 * 24 + 2. A float64
fma is the C library's. Square roots and divisions are IEEE's, as in numpy. Coefficients are formed
in double and rounded once to the compute type. 16-bit tensors compute in float32 and round once,
when stored. csrc/core/setting.h defines the terms of a prediction.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrain_ext import laws

Array: TypeAlias = npt.NDArray[Any]
Numbers: TypeAlias = laws.SgdNumbers | laws.AdamNumbers | laws.LionNumbers
INTS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}

# Arithmetic.


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
    with np.errstate(all="ignore"):
        s, e = _two_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
        return _round_to_odd(s, e).astype(np.float32)


_libm_fma = ctypes.CDLL(None).fma
_libm_fma.argtypes = [ctypes.c_double] * 3
_libm_fma.restype = ctypes.c_double
_fma_of_objects = np.frompyfunc(_libm_fma, 3, 1)


def fma64(a: Array, b: Array, c: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(_fma_of_objects(a, b, c), dtype=np.float64)


def fma(a: Array, b: Array, c: Array) -> Array:
    return fma64(a, b, c) if c.dtype == np.float64 else fma32(a, b, c)


def widen(t: Tensor) -> Array:
    """Return the values in the compute type: float64 for float64, else float32."""
    wide = t if t.dtype in (torch.float64, torch.float32) else t.float()
    return wide.numpy().copy()


def narrow(x: Array, dtype: torch.dtype) -> Tensor:
    """Round to a type, to nearest, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


def scalars_like(x: Array) -> Callable[[float], Array]:
    """Return the conversion of a coefficient, formed in double, to the compute type."""

    def scalar(value: float) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(value).astype(x.dtype)

    return scalar


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output of SplitMix64 at a state (Steele, Lea, Flood, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def round_stochastically(exact: Array, seed: int, position: int) -> Tensor:
    """Round float32 numbers to bfloat16 by a seed and the position of the first in its call."""
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed % 2**64], np.uint64) + step)
        places = np.arange(position, position + exact.size, dtype=np.uint64)
        four = _mixed(start + (places >> np.uint64(2)) * step)  # elements share a number
        random = (four >> (places % np.uint64(4) * np.uint64(16))) & np.uint64(0xFFFF)
    bits = np.ascontiguousarray(exact).view(np.uint32).astype(np.uint64)
    high = ((bits + random) >> np.uint64(16)).astype(np.uint16)
    high[np.isnan(exact)] = 0x7FC0
    return torch.from_numpy(high.view(np.int16).copy()).view(torch.bfloat16)


# Steps and predictions, of flat tensors. `state` is the momentum buffer, or both moments of Adam.


def keywords(numbers: Numbers) -> dict[str, Any]:
    """Return the numbers as arguments of a step; only NAdam has the product of all mu."""
    given = {field.name: getattr(numbers, field.name) for field in fields(numbers)}
    given.pop("correction", None)
    if given.get("momentum_decay", 0) is None:
        del given["mu_product"]
    return given


def direction(numbers: Numbers, w: Tensor, g: Tensor, factor: float = 1.0) -> Array:
    """d = factor*g, or -factor*g, plus l2*W as one fma; without a penalty W is not read."""
    wide = widen(w)
    scalar = scalars_like(wide)
    penalty = scalar(0.0 if _is_decoupled(numbers) else numbers.weight_decay)
    with np.errstate(all="ignore"):
        d = scalar(-factor if numbers.maximize else factor) * widen(g).astype(wide.dtype)
        return fma(penalty, wide, d) if penalty else d


def _is_decoupled(numbers: Numbers) -> bool:
    return isinstance(numbers, laws.LionNumbers) or numbers.decoupled_weight_decay


def step(
    numbers: Numbers,
    w: Tensor,
    g: Tensor,
    state: Sequence[Tensor],
    *,
    first: bool = False,
    factor: float = 1.0,
    seed: int | None = None,
    position: int = 0,
) -> list[Tensor]:
    """Return new weights and state; `seed` of the weights' stochastic rounding, if they have it."""
    wide = widen(w)
    d = direction(numbers, w, g, factor)
    with np.errstate(all="ignore"):
        kept = wide
        if _is_decoupled(numbers):
            kept = _keep(1.0 - numbers.lr * numbers.weight_decay, wide)
        of_rule: Any = {"sgd": _sgd_step, "adam": _adam_step, "lion": _lion_step}[numbers.rule]
        new, new_state = of_rule(numbers, kept, d, state, first)
    new_w = narrow(new, w.dtype) if seed is None else round_stochastically(new, seed, position)
    stored = [narrow(x, t.dtype) for x, t in zip(new_state, state, strict=True)]
    adam = isinstance(numbers, laws.AdamNumbers) and stored[1].dtype == torch.bfloat16
    if adam and numbers.betas[1] > 1 - 2**-8:  # rounded to nearest it would not move
        stored[1] = round_stochastically(new_state[1], ~numbers.step, position)
    return [new_w, *stored]


def gain(numbers: laws.SgdNumbers) -> float:
    """Return the gradient's factor in the momentum."""
    return 1.0 - numbers.momentum if numbers.smoothed else 1.0 - numbers.dampening


def _sgd_step(
    numbers: laws.SgdNumbers, kept: Array, d: Array, state: Sequence[Tensor], first: bool
) -> tuple[Array, list[Array]]:
    scalar = scalars_like(kept)
    lr, mu = numbers.lr, numbers.momentum
    if mu == 0:
        return fma(scalar(-lr), d, kept), [widen(t) for t in state]
    by = gain(numbers)
    v = d if first else fma(scalar(mu), widen(state[0]).astype(kept.dtype), scalar(by) * d)
    if not numbers.nesterov:
        return fma(scalar(-lr), v, kept), [v]
    by_gradient = scalar(lr * by)  # W - lr*gain*d - lr*mu*v, rounded after each term
    kept = fma(-by_gradient, d, kept) if by_gradient else kept
    return fma(scalar(-lr * mu), v, kept), [v]


def _adam_step(
    numbers: laws.AdamNumbers, kept: Array, d: Array, state: Sequence[Tensor], _: bool
) -> tuple[Array, list[Array]]:
    scalar = scalars_like(kept)
    beta1, beta2 = numbers.betas
    m, u = (widen(t).astype(kept.dtype) for t in state)
    m = fma(scalar(beta1), m, scalar(1.0 - beta1) * d)
    u = fma(scalar(beta2), u, scalar(1.0 - beta2) * d * d)
    return kept - _adam_way(numbers, _adam_term(numbers), m, u, d), [m, u]


def _lion_step(
    numbers: laws.LionNumbers, kept: Array, d: Array, state: Sequence[Tensor], _: bool
) -> tuple[Array, list[Array]]:
    scalar = scalars_like(kept)
    beta1, beta2 = numbers.betas
    m = widen(state[0]).astype(kept.dtype)
    way, lr = np.sign(fma(scalar(beta1), m, scalar(1.0 - beta1) * d)), scalar(numbers.lr)
    m = fma(scalar(beta2), m, scalar(1.0 - beta2) * d)
    return fma(-lr, way, kept) if lr else kept, [m]


@cache
def power(x: float, n: int) -> float:
    """Return x^n, rounded once."""
    return float(Fraction(x) ** n)


def _adam_term(numbers: laws.AdamNumbers) -> laws.Term:
    """Return the step's coefficients, with Adam's bias corrections or NAdam's schedule of mu."""
    t, (beta1, beta2) = numbers.step, numbers.betas
    root = 1.0 / math.sqrt(1.0 - power(beta2, t))
    if numbers.momentum_decay is None:
        return laws.Term(1.0, numbers.lr / (1.0 - power(beta1, t)), 0.0, root)
    now, following = (nadam_mu(beta1, numbers.momentum_decay, i) for i in (t, t + 1))
    product = numbers.mu_product
    by_gradient = numbers.lr * (1.0 - now) / (1.0 - product)
    return laws.Term(1.0, numbers.lr * following / (1.0 - product * following), by_gradient, root)


def nadam_mu(beta1: float, momentum_decay: float, step: int) -> float:
    """Dozat's schedule of NAdam's momentum, with torch's constant."""
    return beta1 * (1.0 - 0.5 * 0.96 ** (step * momentum_decay))


def nadam_product(beta1: float, momentum_decay: float, step: int) -> float:
    return math.prod(nadam_mu(beta1, momentum_decay, i) for i in range(1, step + 1))


def _adam_way(numbers: laws.AdamNumbers, term: laws.Term, m: Array, u: Array, d: Array) -> Array:
    """Return the quotient that Adam moves by."""
    scalar = scalars_like(m)
    moment = scalar(term.momentum) * m
    if scalar(term.gradient):
        moment = fma(scalar(term.momentum), m, scalar(term.gradient) * d)
    return moment / fma(np.sqrt(u), scalar(term.root), np.full_like(u, scalar(numbers.eps)))


def _keep(factor: float, wide: Array) -> Array:
    """A factor of 1 keeps the bits."""
    rounded = scalars_like(wide)(factor)
    return wide if rounded == 1 else np.asarray(rounded * wide)


def predict(
    numbers: Numbers,
    terms: Sequence[laws.Term],
    w: Tensor,
    state: Sequence[Tensor],
    d: Array | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Apply the terms to stored values; what does not move keeps W. `d` is the step's direction."""
    if not terms and dtype in (None, w.dtype):
        return w.clone()
    wide = widen(w)
    scalar = scalars_like(wide)
    v, *second = (widen(t).astype(wide.dtype) for t in state)
    gradient = np.zeros_like(wide) if d is None else d
    with np.errstate(all="ignore"):
        for t in terms:
            wide = _keep(t.keep, wide)
            by_momentum, by_gradient = scalar(t.momentum), scalar(t.gradient)
            if isinstance(numbers, laws.AdamNumbers):
                if by_momentum or by_gradient:
                    wide = wide - _adam_way(numbers, t, v, second[0], gradient)
            elif isinstance(numbers, laws.LionNumbers):
                along = fma(by_gradient, gradient, v) if by_gradient else v
                wide = fma(-by_momentum, np.sign(along), wide) if by_momentum else wide
            else:
                wide = fma(-by_gradient, gradient, wide) if by_gradient else wide
                wide = fma(-by_momentum, v, wide) if by_momentum else wide
    return narrow(wide, dtype or w.dtype)


def extrapolate(w: Tensor, previous: Tensor, steps: float, dtype: torch.dtype) -> Tensor:
    """W + steps*(W - previous): the difference rounded, then one fma."""
    if not steps:
        return w.clone().to(dtype)
    wide = widen(w)
    with np.errstate(all="ignore"):
        return narrow(fma(scalars_like(wide)(steps), wide - widen(previous), wide), dtype)


_LANES, _CHUNK = 256, 2048


def distance(w: Sequence[Tensor], other: Sequence[Tensor]) -> Array:
    """Return the distance of every tensor, and of all: sums in lanes of a chunk, then a tree."""
    squares = []
    for a, b in zip(w, other, strict=True):
        with np.errstate(all="ignore"):
            d = widen(a).astype(np.float64) - widen(b).astype(np.float64)
            chunks = [
                _tree(_lanes(d[at : at + _CHUNK], _square)) for at in range(0, d.size, _CHUNK)
            ]
            squares.append(_tree(_lanes(np.array(chunks), _add)))
    total = 0.0
    for square in squares:
        total += square
    return np.sqrt(np.array([*squares, total]))


def _square(x: Array, lanes: Array) -> Array:
    return fma64(x, x, lanes)


def _add(x: Array, lanes: Array) -> Array:
    return lanes + x


def _lanes(x: Array, add: Callable[[Array, Array], Array]) -> Array:
    """Add element i to lane i % 256, in order."""
    lanes = np.zeros(_LANES)
    for at in range(0, x.size, _LANES):
        some = x[at : at + _LANES]
        lanes[: some.size] = add(some, lanes[: some.size])
    return lanes


def _tree(lanes: Array) -> float:
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


# Comparisons.


def bits(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().view(INTS[t.dtype])


def assert_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that every bit is equal, NaN payloads too."""
    _assert_equal(actual, expected, what, exact=True)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that every bit is equal, but any NaN matches any NaN."""
    _assert_equal(actual, expected, what, exact=False)


def assert_lists(
    actual: Sequence[Tensor], expected: Sequence[Tensor], what: str, *, exact: bool = False
) -> None:
    """Compare element by element, with the index in the message."""
    assert len(actual) == len(expected), what
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        _assert_equal(a, e, f"{what}[{i}]", exact)


def _assert_equal(actual: Tensor, expected: Tensor, what: str, exact: bool) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    a, e = actual.detach().cpu(), expected.detach().cpu()
    differ = bits(a) != bits(e)
    if not exact:
        differ &= ~(a.isnan() & e.isnan()).contiguous()
    if bool(differ.any()):
        at = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements of shape {tuple(a.shape)} "
            f"{a.dtype} differ, first at {at}: {a[at].item()!r} instead of {e[at].item()!r}"
        )
