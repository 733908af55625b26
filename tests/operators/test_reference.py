"""Tests the reference itself against rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as hs
import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from hypothesis import given

_LARGEST = np.finfo(np.float32).max
_EDGES32 = [0.0, -0.0, 1.0, -1.0, 2.0**-149, 2.0**-126, 1 + 2.0**-23, 1 - 2.0**-24, float(_LARGEST)]
_FLOAT32 = hs.one_of(
    hs.sampled_from(_EDGES32), hs.floats(width=32, allow_nan=False, allow_infinity=False)
)
_FLOAT64 = hs.floats(allow_nan=False, allow_infinity=False)


def _fma_rational(a: float, b: float, c: float) -> float:
    """Return a * b + c of finite numbers in rational arithmetic: integer division rounds once."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:  # an exact zero has the sign of a float sum of an exact product's sign and c
        sign = math.copysign(1.0, a) * math.copysign(1.0, b)
        return math.copysign(0.0, sign) + c if a == 0 or b == 0 else 0.0
    try:
        value = exact.numerator / exact.denominator
    except OverflowError:
        value = math.inf if exact > 0 else -math.inf
    return math.copysign(value, 1.0 if exact > 0 else -1.0)


def _nearest_float32(exact: Fraction) -> float:
    """Round a rational of float32's range by comparing the two neighbours of a first guess."""
    with np.errstate(over="ignore"):
        guess = np.clip(np.float32(float(exact)), -_LARGEST, _LARGEST)
        around = [np.nextafter(guess, np.float32(d)) for d in (-np.inf, np.inf)]

    def distance(x: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1

    return float(min((x for x in (guess, *around) if np.isfinite(x)), key=distance))


@given(a=_FLOAT32, b=_FLOAT32, c=_FLOAT32)
def test_fma32_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = float(ref.fma32(*(np.array([x], dtype=np.float32) for x in (a, b, c)))[0])
    if exact == 0:
        assert got == 0
    elif abs(exact) < Fraction(float(_LARGEST)):
        assert got == _nearest_float32(exact)


@given(a=_FLOAT64, b=_FLOAT64, c=_FLOAT64)
def test_fma64_rounds_once(a: float, b: float, c: float) -> None:
    got = float(ref.fma64(*(np.array([x]) for x in (a, b, c)))[0])
    expected = _fma_rational(a, b, c)
    assert got == expected and math.copysign(1.0, got) == math.copysign(1.0, expected)


def test_fma64_rounds_once_where_it_cancels() -> None:
    """With c close to -a*b, a sum of two rounded terms fails."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(5000), rng.standard_normal(5000)
    c = -(a * b) * (1 + rng.integers(-3, 4, 5000) * 2.0**-52)
    expected = [_fma_rational(*map(float, abc)) for abc in zip(a, b, c, strict=True)]
    assert np.array_equal(ref.fma64(a, b, c), np.array(expected))


def test_a_product_and_a_sum_would_not_do() -> None:
    """Two roundings differ from one somewhere, so that comparisons with the reference can fail."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(1000).astype(np.float32) for _ in range(3))
    assert not np.array_equal(ref.fma32(a, b, c), a * b + c)


def test_special_values() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    a = np.array([inf, 0, 1, nan, 2, -0.0], dtype=np.float32)
    b = np.array([1, inf, 1, 1, 3e38, 0.0], dtype=np.float32)
    c = np.array([-inf, 1, -1, 1, 1, -0.0], dtype=np.float32)
    got = ref.fma32(a, b, c)
    assert np.isnan(got[[0, 1, 3]]).all() and got[2] == 0 and not np.signbit(got[2])
    assert got[4] == inf and np.signbit(got[5])


@given(x=_FLOAT32.map(abs), y=_FLOAT32)
def test_roots_and_quotients_are_rounded_once(x: float, y: float) -> None:
    """The emulation of Adam relies on numpy's being IEEE's: no representable number is closer."""
    a, b = np.float32(x), np.float32(y)
    root = np.sqrt(a)
    # The root lies between the midpoints to the result's neighbours.
    below, above = (np.nextafter(root, np.float32(d)) for d in (-1.0, np.inf))
    if x > 0:
        low = (Fraction(float(root)) + Fraction(float(below))) / 2
        high = (Fraction(float(root)) + Fraction(float(above))) / 2
        assert low**2 <= Fraction(x) <= high**2
    if y != 0:
        with np.errstate(all="ignore"):
            got = float(a / b)
        exact = Fraction(x) / Fraction(y)
        if exact and abs(exact) < Fraction(float(_LARGEST)):
            assert got == _nearest_float32(exact)


def test_assertions_fail_when_they_should() -> None:
    one, nan = torch.tensor([1.0]), torch.tensor([math.nan])
    with pytest.raises(AssertionError, match="differ"):
        ref.assert_same(torch.tensor([0.0]), torch.tensor([-0.0]), "zeros")
    with pytest.raises(AssertionError, match="differ"):
        ref.assert_same(nan, one, "nan")
    ref.assert_same(nan, -nan, "any NaN matches any NaN")
    with pytest.raises(AssertionError, match="differ"):
        ref.assert_bits(nan, -nan, "but not to the bit")
