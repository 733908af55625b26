"""Tests zero_grad: the step zeroes gradients in the pass that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.laws import SecondOrder
from spectrain_ext.operators.numbers import Adam, Sgd

SIZES = (1, 7, 64, 1025, 0, 9000)
Lists = list[list[Tensor]]


def _lists(n: int, dtype: torch.dtype = torch.float32, grad: torch.dtype | None = None) -> Lists:
    """W, g, m, u, and outputs; u is positive."""
    generator = torch.Generator().manual_seed(7)
    lists = [[torch.randn(k, generator=generator).to(dtype) for k in SIZES] for _ in range(n)]
    if grad is not None:
        lists[1] = [t.to(grad) for t in lists[1]]
    lists[3] = [t.abs() for t in lists[3]]
    return lists


def _sgd(x: Lists, **more: Any) -> None:
    """With a prediction that needs the gradient."""
    st.sgd_step_(x[0], x[1], x[2], lr=0.1, momentum=0.9, weight_decay=0.01,
                 predict=[(SecondOrder(3.0, 1.0), x[4]), (1.0, x[5])], **more)  # fmt: skip


def _sgd_plain(x: Lists, **more: Any) -> None:
    st.sgd_step_(x[0], x[1], None, lr=0.1, momentum=0.0, **more)


def _adam(x: Lists, **more: Any) -> None:
    st.adam_step_(x[0], x[1], x[2], x[3], lr=0.1, step=3, weight_decay=0.01,
                  momentum_decay=4e-3, mu_product=0.5, predict=[(2.0, x[4])], **more)  # fmt: skip


def _sgd_plan(x: Lists, **more: Any) -> None:
    plan = st.Plan(x[0], momentum_buffers=x[2], grads=x[1], outs=[x[4]])
    plan.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0], **more)


def _sgd_groups(x: Lists, **more: Any) -> None:
    groups = [i % 2 for i in range(len(SIZES))]
    plan = st.Plan(x[0], momentum_buffers=x[2], grads=x[1], groups=groups)
    plan.sgd_step_([Sgd(0.1, 0.9), Sgd(0.2, 0.8)], **more)


def _adam_plan(x: Lists, **more: Any) -> None:
    plan = st.Plan(x[0], exp_avgs=x[2], exp_avg_sqs=x[3], grads=x[1], outs=[x[4]])
    plan.adam_step_([Adam(0.1, (0.9, 0.99), 1e-8, 0.01, 3)], predict=[2.0], **more)


_STEPS: dict[str, Callable[..., None]] = {
    "sgd": _sgd,
    "sgd_plain": _sgd_plain,
    "adam": _adam,
    "sgd_plan": _sgd_plan,
    "sgd_groups": _sgd_groups,
    "adam_plan": _adam_plan,
}
every_step = pytest.mark.parametrize("name", _STEPS)


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _all_zero(tensors: list[Tensor]) -> bool:
    return all(not t.view(torch.uint8).any() for t in tensors)  # no negative zeros


@every_step
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16],
                         ids=str)  # fmt: skip
def test_it_changes_nothing_else(name: str, dtype: torch.dtype) -> None:
    x, expected = _lists(6, dtype), _lists(6, dtype)
    _STEPS[name](x, zero_grad=True)
    _STEPS[name](expected)
    assert _all_zero(x[1]) and not _all_zero(expected[1])
    for k in (0, 2, 3, 4, 5):
        assert _same(x[k], expected[k]), f"list {k}"


@pytest.mark.parametrize("name", ["sgd_plain", "sgd_plan", "adam_plan"])
def test_narrow_gradients_beside_master_weights(name: str) -> None:
    x, expected = (_lists(6, grad=torch.bfloat16) for _ in range(2))
    _STEPS[name](x, zero_grad=True)
    _STEPS[name](expected)
    assert _all_zero(x[1])
    for k in (0, 2, 3, 4):
        assert _same(x[k], expected[k]), f"list {k}"


@every_step
def test_a_skipped_step_still_does(name: str) -> None:
    x, before = _lists(6), _lists(6)
    _STEPS[name](x, zero_grad=True, found_inf=torch.ones(()))
    assert _all_zero(x[1])
    for k in (0, 2, 3, 4, 5):
        assert _same(x[k], before[k]), f"list {k}"


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("name", ["sgd", "sgd_plain", "adam"])
def test_version_counters_say_so(name: str, zero_grad: bool) -> None:
    x = _lists(6)
    _STEPS[name](x, zero_grad=zero_grad)
    assert all(g._version == int(zero_grad) for g in x[1])


def test_a_missing_gradient_is_left_missing() -> None:
    x = _lists(4)
    grads: list[Tensor | None] = [None, *x[1][1:]]
    st.sgd_step_(x[0], grads, x[2], lr=0.1, momentum=0.9, zero_grad=True)
    assert grads[0] is None and _all_zero(x[1][1:])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_graph(backend: str) -> None:
    x, expected = _lists(6), _lists(6)
    torch._dynamo.reset()

    def call(x: Lists) -> None:
        st.sgd_step_(x[0], [None, *x[1][1:]], x[2], lr=0.1, momentum=0.9, zero_grad=True)
        st.adam_step_(x[4], x[5], x[2], x[3], lr=0.1, step=1, zero_grad=True)

    torch.compile(call, backend=backend, fullgraph=True)(x)
    call(expected)
    for k in range(6):
        assert _same(x[k], expected[k]), f"list {k}"
    assert _all_zero(x[5])


class TestBadInput:
    """Memory that cannot be set to zero is rejected before any write."""

    @pytest.mark.parametrize("name", ["sgd", "sgd_plan", "adam_plan"])
    def test_gradients_that_share_memory(self, name: str) -> None:
        x, before = _lists(6), _lists(6)
        x[1][3] = x[1][5][:1025]
        with pytest.raises(
            ValueError, match=r"grads\[5\]: is set to zero.*overlap with grads\[3\]"
        ):
            _STEPS[name](x, zero_grad=True)
        assert _same(x[0], before[0])
        _STEPS[name](x)

    @pytest.mark.parametrize("name", ["plan", "function"])
    def test_a_read_only_array(self, name: str) -> None:
        w, g, v = (np.ones(5, np.float32) for _ in range(3))
        g.flags.writeable = False
        plan = st.Plan(w, momentum_buffers=v, grads=g)
        with pytest.raises(ValueError, match="grads: expected a writable array, got"):
            if name == "plan":
                plan.sgd_step_(lr=0.1, momentum=0.9, zero_grad=True)
            else:
                st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, zero_grad=True)
        assert (w == 1).all() and (v == 1).all()
        plan.sgd_step_(lr=0.1, momentum=0.9)

    def test_a_scale_among_the_gradients(self) -> None:
        x, before = _lists(6), _lists(6)
        with pytest.raises(
            ValueError, match=r"clip_factor: expected memory.*overlap with grads\[0\]"
        ):
            _sgd(x, zero_grad=True, clip_factor=x[1][0])
        assert _same(x[0], before[0])

    def test_other_gradients_are_looked_at_again(self) -> None:
        w = [torch.ones(3), torch.ones(3)]
        shared = torch.ones(4)
        plan = st.Plan(w, grads=[torch.ones(3), torch.ones(3)])
        plan.sgd_step_(lr=0.1, momentum=0.0, zero_grad=True)
        plan.refresh([shared[:3], shared[1:]])
        with pytest.raises(ValueError, match=r"grads\[1\]: is set to zero"):
            plan.sgd_step_(lr=0.1, momentum=0.0, zero_grad=True)


@pytest.mark.cuda
@pytest.mark.parametrize("found", [0.0, 1.0])
@every_step
def test_on_a_gpu(name: str, found: float) -> None:
    expected = _lists(6)
    x = [[t.cuda() for t in ts] for ts in _lists(6)]
    _STEPS[name](x, zero_grad=True, found_inf=torch.full((), found, device="cuda"))
    _STEPS[name](expected, zero_grad=True, found_inf=torch.full((), found))
    for k in range(6):
        assert _same([t.cpu() for t in x[k]], expected[k]), f"list {k}"
