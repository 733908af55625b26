"""Tests lists of a thousand tensors, sequences of any kind, and tensors that autograd knows.

How tensors lie in memory, and the sizes around every boundary, are in test_calls.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.ops_options import DTYPES
from helpers.ops_tensors import values
from torch import Tensor

import spectrain_ext as st


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("count", [999, 1000, 1001, 3000])
def test_many_tensors_get_the_bits_of_a_few(count: int, device: str) -> None:
    """All types mixed; a kernel's table moves at about a thousand rows."""
    rng = np.random.default_rng(count)
    lists: list[list[Tensor]] = [[], [], [], []]
    for i in range(count):
        types = DTYPES["all"][i % len(DTYPES["all"])]
        n = int(rng.integers(0, 40))
        for stream, dtype in zip(
            lists, (types.weights, types.grads, types.state, types.outs[0]), strict=True
        ):
            stream.append(values(rng, "normal", n, dtype))
    together = [[t.to(device, copy=True) for t in stream] for stream in lists]
    w, g, v, out = together
    st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, weight_decay=0.01, predict=[(3.0, out)])
    for at in range(0, count, 100):
        w, g, v, out = (stream[at : at + 100] for stream in lists)
        st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, weight_decay=0.01, predict=[(3.0, out)])
    for name, many, few in zip(("w", "g", "v", "out"), together, lists, strict=True):
        ref.assert_lists(many, few, name, exact=True)


def test_tuples_and_generators() -> None:
    module = torch.nn.Linear(4, 3)
    v = tuple(torch.randn_like(p) for p in module.parameters())
    expected = list(st.predict(list(module.parameters()), v, lr=0.1, steps=2.0))
    predicted = st.predict(module.parameters(), v, lr=0.1, steps=2.0)
    ref.assert_lists(list(predicted), expected, "params")


def test_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    """Autograd hands out gradients whose strides differ there."""
    w, v = torch.randn(4, 1, 3), torch.randn(4, 1, 3)
    odd = torch.empty(12).as_strided((4, 1, 3), (3, 77, 1))
    st.restore_(odd, w)
    assert torch.equal(odd, w)
    plan, expected = st.Plan(w, grads=v), w - odd
    plan.refresh(odd)
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert torch.equal(w, expected)


def test_backward_after_a_plan_uses_the_weights_that_are_there_now() -> None:
    """Documented: the input's gradient is computed with the new weights, and nothing raises."""
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    loss = (w @ x).sum()
    new = torch.randn(4, 4)
    st.Plan(w, stashed=new).restore_()
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, new.sum(0))


def test_inference_tensors_have_no_counter_and_are_taken() -> None:
    with torch.inference_mode():
        w, v = torch.zeros(5), torch.ones(5)
        st.predict_(w, v, lr=0.5, steps=1.0)
        assert w.tolist() == [-0.5] * 5
