"""Tests version counters: operators increment them like torch's in-place ones, Plans do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.numbers import Adam, Sgd


def _three() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return tuple([torch.randn(5), torch.randn(2, 3)] for _ in range(3))  # type: ignore[return-value]


Call = Callable[[list[Tensor], list[Tensor], list[Tensor]], object]
# name, the call on three lists, and which of them it writes
_CALLS: list[tuple[str, Call, tuple[bool, bool, bool]]] = [
    ("predict_", lambda a, b, c: st.predict_(a, b, lr=0.1, steps=1.0), (True, False, False)),
    ("predict_0", lambda a, b, c: st.predict(a, b, lr=0.1, steps=0.0, out=c), (False, False, True)),
    ("predict", lambda a, b, c: st.predict(a, b, lr=0.1, steps=1.0, out=c), (False, False, True)),
    ("stash", lambda a, b, c: st.stash(a, c), (False, False, True)),
    ("restore_", lambda a, b, c: st.restore_(a, b), (True, False, False)),
    ("swap_", lambda a, b, c: st.swap_(a, c), (True, False, True)),
    (
        "stash_predict_",
        lambda a, b, c: st.stash_predict_(a, c, b, lr=0.1, steps=1.0),
        (True, False, True),
    ),
    ("sgd_step_", lambda a, b, c: st.sgd_step_(a, b, c, lr=0.1, momentum=0.9), (True, False, True)),
    (
        "sgd_step_ without momentum",
        lambda a, b, c: st.sgd_step_(a, b, c, lr=0.1, momentum=0.0),
        (True, False, False),
    ),
    (
        "sgd_step_ with a prediction",
        lambda a, b, c: st.sgd_step_(
            a,
            [torch.randn_like(t) for t in a],
            b,
            lr=0.1,
            momentum=0.9,
            predict=[(2.0, c)],
        ),
        (True, True, True),
    ),
    (
        "adam_step_",
        lambda a, b, c: st.adam_step_(a, [torch.randn_like(t) for t in a], b, c, lr=0.1, step=1),
        (True, True, True),
    ),
    (
        "adam_step_ with a prediction",
        lambda a, b, c: st.adam_step_(
            [torch.randn_like(t) for t in a],
            a,
            [torch.zeros_like(t) for t in a],
            b,
            lr=0.1,
            step=1,
            predict=[(2.0, c)],
        ),
        (False, True, True),
    ),
    (
        "adam_predict",
        lambda a, b, c: st.adam_predict(
            a, b, [torch.rand_like(t) for t in a], lr=0.1, step=1, steps=2.0, out=c
        ),
        (False, False, True),
    ),
    ("extrapolate", lambda a, b, c: st.extrapolate(a, b, steps=2.0, out=c), (False, False, True)),
]


@pytest.mark.parametrize(("name", "call", "writes"), _CALLS, ids=[c[0] for c in _CALLS])
def test_what_is_written_is_bumped_and_nothing_else(
    name: str, call: Call, writes: tuple[bool, bool, bool]
) -> None:
    lists = _three()
    before = [[t._version for t in tensors] for tensors in lists]
    call(*lists)
    for k, (tensors, was, written) in enumerate(zip(lists, before, writes, strict=True)):
        for i, t in enumerate(tensors):
            assert t._version == was[i] + (1 if written else 0), f"{name}: list {k}, tensor {i}"


def _uses_weight() -> tuple[Tensor, Tensor]:
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, requires_grad=True)
    return w, (w @ x).square().sum()


@pytest.mark.parametrize(
    "op", ["predict_", "restore_", "swap_", "stash_predict_", "sgd_step_", "adam_step_"]
)
def test_a_write_between_forward_and_backward_raises(op: str) -> None:
    w, loss = _uses_weight()
    other, third = torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        if op == "predict_":
            st.predict_(w, other, lr=0.1, steps=1.0)
        elif op == "restore_":
            st.restore_(w, other)
        elif op == "swap_":
            st.swap_(w, other)
        elif op == "stash_predict_":
            st.stash_predict_(w, other, third, lr=0.1, steps=1.0)
        elif op == "adam_step_":
            st.adam_step_(w, other, third, torch.rand(4, 4), lr=0.1, step=1)
        else:
            st.sgd_step_(w, other, third, lr=0.1, momentum=0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_prediction_out_of_place_leaves_the_graph_alone() -> None:
    w, loss = _uses_weight()
    hat = st.predict(w, torch.randn(4, 4), lr=0.1, steps=1.0)
    assert isinstance(hat, Tensor) and not hat.requires_grad
    loss.backward()
    assert w.grad is not None


def test_a_plan_does_not_bump() -> None:
    """A pipeline changes weights between forward and backward, which is what a Plan is for."""
    w, v, g, kept, out = (torch.randn(6) for _ in range(5))
    plan = st.Plan(w, momentum_buffers=v, grads=g, stashed=kept, outs=[out])
    before = [t._version for t in (w, v, g, kept, out)]
    plan.predict_(lr=0.1, steps=1.0)
    plan.predict(lr=0.1, steps=1.0)
    plan.stash()
    plan.restore_()
    plan.swap_()
    plan.stash_predict_(lr=0.1, steps=1.0)
    plan.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0])
    plan.predict_([Sgd(0.1, 0.9)], steps=2.0)
    plan.stash_predict_([Sgd(0.1, 0.9)], steps=2.0)
    plan.extrapolate(steps=2.0)
    plan.write_out()
    assert [t._version for t in (w, v, g, kept, out)] == before
    adam = st.Plan(w, exp_avgs=v, exp_avg_sqs=kept, grads=g, outs=[out])
    adam.adam_step_([Adam(0.1, (0.9, 0.99), 1e-8, 0.0, 1)], predict=[2.0])
    assert [t._version for t in (w, v, g, kept, out)] == before


def test_backward_after_a_plan_uses_the_weights_that_are_there_now() -> None:
    """Documented: the input's gradient is computed with the new weights, and nothing raises."""
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, requires_grad=True)
    loss = (w @ x).sum()
    new = torch.randn(4, 4)
    st.Plan(w, stashed=new).restore_()
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, new.sum(0))


def test_parameters_that_require_grad_are_taken() -> None:
    layer = torch.nn.Linear(3, 3)
    params = list(layer.parameters())
    v = [torch.randn_like(p) for p in params]
    with torch.no_grad():
        st.predict_(params, v, lr=0.1, steps=1.0)
        kept = st.stash(params)
        st.sgd_step_(params, [torch.ones_like(p) for p in params], v, lr=0.1, momentum=0.9)
        st.restore_(params, list(kept))
    assert all(p.requires_grad and p.is_leaf for p in params)
    assert not any(t.requires_grad for t in kept)


def test_inference_tensors_have_no_counter_and_are_taken() -> None:
    with torch.inference_mode():
        w, v = torch.randn(5), torch.randn(5)
        expected = torch.add(w.double(), v.double(), alpha=-0.5).float()
        st.predict_(w, v, lr=0.5, steps=1.0)
        torch.testing.assert_close(w, expected)


def test_views_share_their_base_counter() -> None:
    flat = torch.zeros(10)
    before = flat._version
    st.predict_(flat[2:5], torch.ones(3), lr=1.0, steps=1.0)
    assert flat._version == before + 1 and flat.sum() == -3


def test_in_place_operators_return_what_they_were_given() -> None:
    """Like torch's own: an in-place operator returns its first argument or nothing."""
    w, v = torch.randn(5), torch.randn(5)
    result = st.predict_(w, v, lr=0.1, steps=1.0)
    assert result is None or result is w
