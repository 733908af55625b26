"""Tests distance between weight versions: the same bits everywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_arrays import Producer
from torch import Tensor

import spectrain_ext as st

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = (1, 5, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 11)


def versions(dtype: torch.dtype, count: int = 3) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(n, generator=generator).to(dtype) for n in SIZES] for _ in range(count)]


def by_definition(a: Tensor, b: Tensor) -> float:
    """The norm with the exact sum of squares."""
    return math.sqrt(math.fsum((a.double() - b.double()).square().tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_the_definition(dtype: torch.dtype) -> None:
    now, predicted, stale = versions(dtype)
    each, total = st.distance(now, [predicted, stale])
    assert each.shape == (2, len(SIZES)) and total.shape == (2,)
    assert each.dtype == total.dtype == torch.float64
    for j, other in enumerate((predicted, stale)):
        exact = [by_definition(a, b) for a, b in zip(other, now, strict=True)]
        assert each[j].tolist() == pytest.approx(exact, rel=1e-14)
        assert total[j].item() == pytest.approx(math.hypot(*exact), rel=1e-14)


def test_the_order_of_summation_is_fixed() -> None:
    """Lanes, then a tree: the same sums in Python."""
    (now,), (other,) = ([v[-1]] for v in versions(torch.float32, 2))
    chunks = []
    for begin in range(0, len(now), 4096):
        d = (other[begin : begin + 4096].double() - now[begin : begin + 4096].double()).numpy()
        lanes = [0.0] * 256
        for i, x in enumerate(d):
            # In double x*x is exact only up to rounding; fma rounds once, as math.fma would.
            lanes[i % 256] = math.fsum([lanes[i % 256], *_exact_square(float(x))])
        chunks.append(_tree(lanes))
    lanes = chunks + [0.0] * (256 - len(chunks))
    each, total = st.distance(now, [other])
    assert each[0, 0].item() == total[0].item() == math.sqrt(_tree(lanes))


def _exact_square(x: float) -> tuple[float, float]:
    """x*x as a sum of two doubles without error (Dekker)."""
    split = 134217729.0 * x
    high = split - (split - x)
    low = x - high
    square = x * x
    return square, ((high * high - square) + 2.0 * high * low) + low * low


def _tree(lanes: list[float]) -> float:
    lanes = list(lanes)
    half = len(lanes) // 2
    while half:
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        half //= 2
    return lanes[0]


def test_threads_and_mixed_types_change_no_bits() -> None:
    now, other = versions(torch.float32, 2)
    now += versions(torch.bfloat16, 2)[0]
    other += versions(torch.bfloat16, 2)[1]
    big = [torch.randn(300_000, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = st.distance([*now, big[0]], [[*other, big[1]]])
        torch.set_num_threads(2)
        two = st.distance([*now, big[0]], [[*other, big[1]]])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    alone = [st.distance(a, [b])[0].item() for a, b in zip(now, other, strict=True)]
    assert one[0][0, :-1].tolist() == alone


def test_nothing_and_the_same() -> None:
    now = [torch.randn(7), torch.empty(0), torch.randn(3)]
    each, total = st.distance(now, [[w.clone() for w in now], now])
    assert not each.any() and not total.any()
    each, total = st.distance([], [[], []])
    assert each.shape == (2, 0) and total.tolist() == [0.0, 0.0]
    each, total = st.distance(now, [])
    assert each.shape == (0, 3) and total.shape == (0,)


def test_what_is_not_finite_shows() -> None:
    now, other = torch.zeros(5000), torch.zeros(5000)
    other[4999] = math.inf
    assert st.distance(now, [other])[1].item() == math.inf
    other[17] = math.nan
    assert math.isnan(st.distance(now, [other])[1].item())


def test_bad_input() -> None:
    w = [torch.randn(4), torch.randn(4)]
    with pytest.raises(ValueError, match=r"others\[1\]\[1\]: expected shape"):
        st.distance(w, [w, [w[0], torch.randn(5)]])
    with pytest.raises(ValueError, match=r"others\[0\]\[1\]: expected float32, the"):
        st.distance(w, [[w[0], w[1].bfloat16()]])
    with pytest.raises(ValueError, match=r"others\[0\]: expected as many tensors as params, 2"):
        st.distance(w, [w[:1]])
    with pytest.raises(TypeError, match=r"others\[0\]"):
        st.distance(w, [w[0]])
    for others in (3, w[0]):
        with pytest.raises(TypeError, match="others: expected a sequence of lists"):
            st.distance(w, others)  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    now, predicted, stale = versions(dtype)
    here = st.distance(now, [predicted, stale])
    there = st.distance(
        [w.cuda() for w in now], [[w.cuda() for w in predicted], [w.cuda() for w in stale]]
    )
    assert torch.equal(here[0], there[0].cpu()) and torch.equal(here[1], there[1].cpu())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_of_other_frameworks(dtype: Any) -> None:
    now, other = (np.random.default_rng(k).standard_normal((2, 3, 5)).astype(dtype) for k in (0, 1))
    each, total = st.distance(torch.from_numpy(now), [torch.from_numpy(other)])
    now.flags.writeable = False  # it is only read
    found = st.distance(list(now), [list(other), [torch.from_numpy(a) for a in other]])
    for norms in found:
        assert type(norms) is np.ndarray and norms.dtype == np.float64
    assert found[0].shape == (2, 2)
    assert found[1].tolist() == [total.item()] * 2
    assert math.hypot(*found[0][0]) == pytest.approx(each.item(), rel=1e-14)
    assert isinstance(st.distance(now, [other])[1], np.ndarray)
    norm = st.distance([Producer(now.copy())], [[other]])[1]  # of no known framework
    assert isinstance(norm, Tensor) and norm.item() == pytest.approx(total.item(), rel=1e-14)
    for refused in (np.float16, np.float32, np.float64):
        if refused is not dtype:
            with pytest.raises(ValueError, match=r"others\[0\]\[1\]: expected .*float.*, got"):
                st.distance(list(now), [[other[0], other[1].astype(refused)]])
