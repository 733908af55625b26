"""Tests stochastic rounding of bfloat16 weights: bits, frequencies, and independence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.numbers import Adam, Sgd

SIZES = (1, 7, 64, 1025, 0, 9000)
Lists = list[list[Tensor]]
Words = npt.NDArray[np.uint64]


def _lists(state: torch.dtype = torch.bfloat16, sizes: tuple[int, ...] = SIZES) -> Lists:
    """W, g, m, u; u is positive."""
    generator = torch.Generator().manual_seed(11)
    lists = [[torch.randn(k, generator=generator).bfloat16() for k in sizes] for _ in range(4)]
    lists[2:] = [[t.to(state) for t in ts] for ts in lists[2:]]
    lists[3] = [t.abs() for t in lists[3]]
    return lists


def _mixed(z: Words) -> Words:
    """The output of SplitMix64 at a state (Steele, Lea, Flood, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _rounded(exact: Tensor, seed: int, position: int) -> Tensor:
    """Return float32 weights rounded by their position in the call."""
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed % 2**64], np.uint64) + step)
        places = np.arange(position, position + exact.numel(), dtype=np.uint64)
        random = _mixed(start + places * step) >> np.uint64(48)
    bits = exact.numpy().view(np.uint32).astype(np.uint64)
    high = ((bits + random) >> np.uint64(16)).astype(np.uint16)
    return torch.from_numpy(high.view(np.int16).copy()).view(torch.bfloat16)


def _sgd(x: Lists, **more: Any) -> None:
    st.sgd_step_(x[0], x[1], x[2], lr=0.1, momentum=0.9, weight_decay=0.01, **more)


def _sgd_plain(x: Lists, **more: Any) -> None:
    st.sgd_step_(x[0], x[1], None, lr=0.1, momentum=0.0, **more)


def _adam(x: Lists, **more: Any) -> None:
    st.adam_step_(x[0], x[1], x[2], x[3], lr=0.1, step=3, weight_decay=0.01, **more)


def _sgd_groups(x: Lists, **more: Any) -> None:
    groups = [i % 2 for i in range(len(SIZES))]
    plan = st.Plan(x[0], momentum_buffers=x[2], grads=x[1], groups=groups)
    plan.sgd_step_([Sgd(0.1, 0.9), Sgd(0.2, 0.8)], **more)


def _adam_plan(x: Lists, **more: Any) -> None:
    plan = st.Plan(x[0], exp_avgs=x[2], exp_avg_sqs=x[3], grads=x[1])
    plan.adam_step_([Adam(0.1, (0.9, 0.99), 1e-8, 0.01, 3)], **more)


_STEPS: dict[str, Callable[..., None]] = {
    "sgd": _sgd,
    "sgd_plain": _sgd_plain,
    "adam": _adam,
    "sgd_groups": _sgd_groups,
    "adam_plan": _adam_plan,
}
every_step = pytest.mark.parametrize("name", _STEPS)


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every_step
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 - 2])
def test_the_bits_are_those_of_the_formula(name: str, state: torch.dtype, seed: int) -> None:
    """The step of float32 weights equals the step before rounding."""
    x, nearest, exact = _lists(state), _lists(state), _lists(state)
    exact = [[t.float() for t in ts] for ts in exact]
    _STEPS[name](x, rounding_seed=seed)
    _STEPS[name](nearest)
    _STEPS[name](exact)
    position = 0
    for w, e in zip(x[0], exact[0], strict=True):
        assert torch.equal(w, _rounded(e, seed, position))
        position += w.numel()
    assert not _same(x[0], nearest[0])
    for k in (1, 2, 3):
        assert _same(x[k], nearest[k]), f"list {k}"


def test_it_does_not_depend_on_how_memory_lies() -> None:
    """With merged tensors, and with odd addresses, which are processed element by element."""
    apart = _lists()
    flat = [torch.cat(ts) for ts in apart]
    together = [list(f.split(SIZES)) for f in flat]
    odd = [[torch.empty(t.numel() + 3, dtype=t.dtype)[3:].copy_(t) for t in ts] for ts in apart]
    odd[1] = [torch.empty(t.numel() + 1, dtype=t.dtype)[1:].copy_(t) for t in apart[1]]
    whole = [[f.clone()] for f in flat]
    for x in (apart, together, odd, whole):
        _sgd(x, rounding_seed=5)
    assert _same(apart[0], together[0]) and _same(apart[0], odd[0])
    assert torch.equal(torch.cat(apart[0]), whole[0][0])


def test_a_missing_gradient_leaves_the_others_their_places() -> None:
    x, all_there = _lists(), _lists()
    before = x[0][3].clone()
    grads: list[Tensor | None] = list(x[1])
    grads[3] = None
    st.sgd_step_(x[0], grads, x[2], lr=0.1, momentum=0.9, rounding_seed=5)
    st.sgd_step_(*all_there[:3], lr=0.1, momentum=0.9, rounding_seed=5)
    assert torch.equal(x[0][3], before)
    assert torch.equal(x[0][5], all_there[0][5])


def test_one_thread_or_many() -> None:
    results = []
    threads = torch.get_num_threads()
    for n in (1, 3):
        x = _lists(sizes=(300_001,))
        torch.set_num_threads(n)
        try:
            _sgd(x, rounding_seed=9)
        finally:
            torch.set_num_threads(threads)
        results.append(x[0])
    assert _same(*results)


def test_what_bfloat16_holds_never_moves() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    for seed in range(20):
        w = every.clone()
        st.sgd_step_(w, torch.zeros_like(w), None, lr=0.1, momentum=0.0, rounding_seed=seed)
        torch.testing.assert_close(w, every, rtol=0, atol=0, equal_nan=True)
        numbers = ~every.isnan() & (every != 0)  # -0 - 0.1*0 has the sign that arithmetic gives it
        assert torch.equal(w[numbers].view(torch.int16), every[numbers].view(torch.int16))


@pytest.mark.parametrize("fraction", [0.0625, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_probability_is_the_distance(fraction: float, sign: float) -> None:
    """Of n elements at `fraction` of the interval, k round up: within 5 deviations."""
    n, ulp = 1 << 18, 2.0**-7
    gradient = torch.full((n,), -sign * fraction * ulp).bfloat16()
    share = (gradient[0].double().abs() / ulp).item()
    shares = []
    for seed in range(4):
        w = torch.full((n,), sign, dtype=torch.bfloat16)
        st.sgd_step_(w, gradient, None, lr=1.0, momentum=0.0, rounding_seed=seed)
        moved = w != sign
        assert (w[moved] == sign * (1 + ulp)).all()
        shares.append(moved.double().mean().item())
    deviation = (share * (1 - share) / n) ** 0.5
    assert all(abs(s - share) < 5 * deviation for s in shares)
    assert abs(sum(shares) / 4 - share) < 5 * deviation / 2


def test_seeds_decide_independently() -> None:
    n = 1 << 16
    decisions = []
    for seed in (0, 1, 2**32, 2**63):
        w = torch.ones(n, dtype=torch.bfloat16)
        half = torch.full_like(w, -(2.0**-8))
        st.sgd_step_(w, half, None, lr=1.0, momentum=0.0, rounding_seed=seed)
        decisions.append((w > 1).double())
    table = torch.corrcoef(torch.stack(decisions)) - torch.eye(4)
    assert table.abs().max() < 5 / n**0.5
    neighbours = torch.corrcoef(torch.stack([decisions[0][1:], decisions[0][:-1]]))
    assert abs(neighbours[0, 1]) < 5 / n**0.5


def test_updates_too_small_for_round_to_nearest_add_up() -> None:
    nearest, stochastic = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(2))
    g = torch.ones_like(nearest)
    for step in range(500):
        st.sgd_step_(nearest, g, None, lr=2.0**-11, momentum=0.0)
        st.sgd_step_(stochastic, g, None, lr=2.0**-11, momentum=0.0, rounding_seed=step)
    assert (nearest == 1).all()
    assert abs(stochastic.double().mean().item() - (1 - 500 * 2.0**-11)) < 1e-3


def test_predictions_start_from_the_rounded_weights() -> None:
    x = _lists()
    ahead = [torch.empty_like(w) for w in x[0]]
    plain = [torch.empty_like(w) for w in x[0]]
    _sgd(x, rounding_seed=3, predict=[(2.0, ahead), (0.0, plain)])
    assert _same(plain, x[0])
    assert _same(ahead, list(st.predict(x[0], x[2], lr=0.1, steps=2.0)))


def test_with_zero_grad_and_a_gate() -> None:
    x, expected, before = _lists(), _lists(), _lists()
    _sgd(x, rounding_seed=3, zero_grad=True, found_inf=torch.ones(()))
    assert _same(x[0], before[0]) and not any(g.any() for g in x[1])
    x = _lists()
    _sgd(x, rounding_seed=3, zero_grad=True, found_inf=torch.zeros(()), grad_scale=torch.ones(()))
    _sgd(expected, rounding_seed=3)
    assert _same(x[0], expected[0]) and _same(x[2], expected[2])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_graph(backend: str) -> None:
    """The seed is an argument of the schema: a new seed needs no new graph."""
    x, expected = _lists(), _lists()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def call(x: Lists, seed: int) -> None:
        st.sgd_step_(*x[:3], lr=0.1, momentum=0.9, rounding_seed=seed)

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for seed in (7, -8, 9, 2**62):
        compiled(x, seed)
        call(expected, seed)
        assert _same(x[0], expected[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


class TestBadInput:
    """Every error names the argument, and nothing changes."""

    @every_step
    def test_other_weights_than_bfloat16(self, name: str) -> None:
        x = _lists()
        x = [[t.float() if i == 3 else t for i, t in enumerate(ts)] for ts in x]
        before = [w.clone() for w in x[0]]
        words = r"rounding_seed: expected bfloat16 weights.*got float32 in params\[3\]"
        with pytest.raises(ValueError, match=words):
            _STEPS[name](x, rounding_seed=1)
        assert _same(x[0], before)

    @pytest.mark.parametrize("seed", [1.0, "1", True], ids=repr)
    def test_no_int(self, seed: Any) -> None:
        with pytest.raises(TypeError, match="rounding_seed: expected an int or None"):
            _sgd(_lists(), rounding_seed=seed)

    @pytest.mark.parametrize("seed", [2**64, -(2**63) - 1], ids=repr)
    def test_more_than_64_bits(self, seed: int) -> None:
        with pytest.raises(ValueError, match="rounding_seed: expected an int of 64 bits"):
            _adam(_lists(), rounding_seed=seed)


@pytest.mark.cuda
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32], ids=str)
@every_step
def test_the_bits_of_the_cpu_on_a_gpu(name: str, state: torch.dtype) -> None:
    expected = _lists(state)
    x = [[t.cuda() for t in ts] for ts in _lists(state)]
    for seed in (3, -4):
        _STEPS[name](x, rounding_seed=seed)
        _STEPS[name](expected, rounding_seed=seed)
    for k in range(4):
        assert _same([t.cpu() for t in x[k]], expected[k]), f"list {k}"
