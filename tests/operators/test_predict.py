"""Tests predict_, predict and stash_predict_: exact bits, any layout, no write out of bounds."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import ops_reference as ref
from helpers.ops_tensors import DTYPES, Case, as_list, cases, check_guards, horizons, rates, tensors
from hypothesis import given

import spectrain_ext as st

NAN, INF = math.nan, math.inf


@given(case=cases(), lr=rates(), steps=horizons())
def test_predict_in_place(case: Case, lr: float, steps: float) -> None:
    w, v = case.stream(0), case.stream(1, momentum=True)
    expected = [
        ref.predict(a.tensor, b.tensor, lr=lr, steps=steps) for a, b in zip(w, v, strict=True)
    ]
    before = [ref.clone(t) for t in tensors(v)]
    st.predict_(case.given(w), case.given(v), lr=lr, steps=steps)
    ref.assert_lists(tensors(w), expected, "params", exact=steps == 0)
    ref.assert_lists(tensors(v), before, "momentum_buffers", exact=True)
    check_guards(params=w, momentum_buffers=v)


@given(case=cases(), lr=rates(), steps=horizons())
def test_predict_into_out(case: Case, lr: float, steps: float) -> None:
    w, v, out = case.stream(0), case.stream(1, momentum=True), case.stream(2)
    expected = [
        ref.predict(a.tensor, b.tensor, lr=lr, steps=steps) for a, b in zip(w, v, strict=True)
    ]
    before = [ref.clone(t) for t in tensors(w) + tensors(v)]
    given_out = case.given(out)
    result = st.predict(case.given(w), case.given(v), lr=lr, steps=steps, out=given_out)
    if case.single:
        assert result is given_out
    else:
        assert all(a is b.tensor for a, b in zip(as_list(result), out, strict=True))
    ref.assert_lists(tensors(out), expected, "out", exact=steps == 0)
    ref.assert_lists(tensors(w) + tensors(v), before, "inputs", exact=True)
    check_guards(params=w, momentum_buffers=v, out=out)


@given(case=cases(), lr=rates(), steps=horizons())
def test_predict_allocates_like_params(case: Case, lr: float, steps: float) -> None:
    w, v = case.stream(0), case.stream(1, momentum=True)
    result = st.predict(case.given(w), case.given(v), lr=lr, steps=steps)
    assert isinstance(result, torch.Tensor) == case.single
    for i, (r, a, b) in enumerate(zip(as_list(result), tensors(w), tensors(v), strict=True)):
        assert r.stride() == a.stride() or r.numel() == 0, f"strides of result[{i}]"
        assert not r.requires_grad
        ref.assert_same(r, ref.predict(a, b, lr=lr, steps=steps), f"result[{i}]")
    check_guards(params=w, momentum_buffers=v)


@given(case=cases(), lr=rates(), steps=horizons())
def test_stash_predict(case: Case, lr: float, steps: float) -> None:
    w, v, kept = case.stream(0), case.stream(1, momentum=True), case.stream(2)
    before = [ref.clone(t) for t in tensors(w)]
    expected = [
        ref.predict(a.tensor, b.tensor, lr=lr, steps=steps) for a, b in zip(w, v, strict=True)
    ]
    st.stash_predict_(case.given(w), case.given(kept), case.given(v), lr=lr, steps=steps)
    ref.assert_lists(tensors(kept), before, "stashed", exact=True)
    ref.assert_lists(tensors(w), expected, "params", exact=steps == 0)
    st.restore_(case.given(w), case.given(kept))
    ref.assert_lists(tensors(w), before, "restored", exact=True)
    check_guards(params=w, momentum_buffers=v, stashed=kept)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_zero_steps_copies_bits_whatever_the_momentum(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """W - 0 * inf would be NaN."""
    w = torch.tensor([1.0, -0.0, NAN, INF, 0.0] * 20).to(dtypes[0])
    v = torch.tensor([INF, NAN, -INF, INF, -0.0] * 20).to(dtypes[1])
    before = w.clone()
    st.predict_(w, v, lr=0.1, steps=0)
    ref.assert_bits(w, before, "predict_")
    ref.assert_bits(st.predict(w, v, lr=0.1, steps=0.0), before, "predict")
    kept = torch.zeros_like(w)
    st.stash_predict_(w, kept, v, lr=0.1, steps=0)
    ref.assert_bits(w, before, "stash_predict_")
    ref.assert_bits(kept, before, "stashed")


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_special_values(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Signed zeros, subnormals and infinities as IEEE 754 has them."""
    info = torch.finfo(dtypes[0])
    small = info.smallest_normal
    w = torch.tensor([0.0, -0.0, -0.0, INF, 1.0, small, info.max, 1.0]).to(dtypes[0])
    v = torch.tensor([0.0, 0.0, -1.0, 1.0, INF, 0.5 * small, 0.0, 1.0]).to(dtypes[1])
    got = st.predict(w, v, lr=1.0, steps=1.0)
    expected = torch.tensor([0.0, -0.0, 1.0, INF, -INF, 0.5 * small, info.max, 0.0])
    assert torch.equal(got, expected.to(dtypes[0]))
    # -1 * 0 = -0; 0 + -0 = +0 and -0 + -0 = -0
    assert got.signbit().tolist() == [False, True, False, False, True, False, False, False]


def test_subnormals_are_not_flushed() -> None:
    tiny = 2.0**-149
    w, v = torch.full((1000,), tiny), torch.full((1000,), -tiny)
    assert torch.equal(st.predict(w, v, lr=1.0, steps=2.0), torch.full((1000,), 3 * tiny))


@pytest.mark.parametrize("steps", [1.0, 3.0, 7.5])
def test_within_half_an_ulp_of_float64_and_as_near_as_torch(steps: float) -> None:
    """Bounds: ours is the float64 value with float32's lr * steps, rounded once (0.5 ulp).

    torch.add may round the product first: 0.5 ulp of the product more.
    """
    w, v = torch.randn(100_003), torch.randn(100_003)
    step = torch.tensor(0.05 * steps, dtype=torch.float32).double()
    product = step * v.double()
    exact = w.double() - product
    error = (st.predict(w, v, lr=0.05, steps=steps).double() - exact).abs()
    # exact is itself a float64 sum, off by at most 2^-53 of the larger term
    slack = 2.0**-52 * (w.double().abs() + product.abs())
    assert bool((error <= 0.5 * ref.ulp(exact) + slack).all())
    torchs = torch.add(w, v, alpha=-float(step))
    apart = (st.predict(w, v, lr=0.05, steps=steps).double() - torchs.double()).abs()
    assert bool((apart <= ref.ulp(exact) + 0.5 * ref.ulp(product) + slack).all())


def test_product_of_lr_and_steps_is_formed_in_double() -> None:
    lr, steps = 0.1, 3.0
    w, v = torch.zeros(1000), torch.randn(1000)
    product = torch.tensor(lr * steps, dtype=torch.float64).float()
    ref.assert_same(st.predict(w, v, lr=lr, steps=steps), -(product * v) + 0.0, "lr * steps")


def test_integers_and_numpy_scalars_are_numbers() -> None:
    import numpy as np

    w, v = torch.randn(10), torch.randn(10)
    expected = st.predict(w, v, lr=1.0, steps=2.0)
    ref.assert_bits(st.predict(w, v, lr=1, steps=2), expected, "int")
    ref.assert_bits(st.predict(w, v, lr=np.float64(1), steps=np.float64(2)), expected, "numpy")
