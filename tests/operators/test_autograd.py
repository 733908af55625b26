"""Tests what autograd sees of operators; their version counters are in test_calls.py."""

from __future__ import annotations

import torch
from torch import Tensor

import spectrain_ext as st


def test_a_prediction_out_of_place_leaves_the_graph_alone() -> None:
    w = torch.randn(4, requires_grad=True)
    loss = w.square().sum()
    hat = st.predict(w, torch.randn(4), lr=0.1, steps=1.0)
    assert isinstance(hat, Tensor) and not hat.requires_grad
    loss.backward()
    assert w.grad is not None


def test_backward_after_a_plan_uses_the_weights_that_are_there_now() -> None:
    """Documented: the input's gradient is computed with the new weights, and nothing raises."""
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    loss = (w @ x).sum()
    new = torch.randn(4, 4)
    st.Plan(w, stashed=new).restore_()
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, new.sum(0))


def test_parameters_that_require_grad_are_taken() -> None:
    params = list(torch.nn.Linear(3, 3).parameters())
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
        w, v = torch.zeros(5), torch.ones(5)
        st.predict_(w, v, lr=0.5, steps=1.0)
        assert w.tolist() == [-0.5] * 5
