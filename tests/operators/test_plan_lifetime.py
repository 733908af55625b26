"""Tests plans whose memory moves: no access to freed memory; errors name the tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from helpers import ops_reference as ref
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import spectrain_ext as st
from spectrain_ext.operators.numbers import Adam

Move = Callable[[nn.Module, Tensor], object]


def _set(_: nn.Module, p: Tensor) -> None:
    with torch.no_grad():
        p.set_(torch.zeros_like(p))


def _data(_: nn.Module, p: Tensor) -> None:
    p.data = torch.zeros_like(p)


#: Ways to give a parameter other memory: another storage, or the same with other bytes.
MOVES: dict[str, Move] = {
    "double": lambda model, _: model.double(),
    "bfloat16": lambda model, _: model.bfloat16(),
    "data": _data,
    "set_": _set,
    "share_memory": lambda model, _: model.share_memory(),
    "resize_": lambda _, p: p.data.resize_(1 << 20),
    "storage.resize_(0)": lambda _, p: p.untyped_storage().resize_(0),
    "storage.resize_": lambda _, p: p.untyped_storage().resize_(1 << 22),
}
CALLS: dict[str, Callable[[st.Plan], object]] = {
    "predict_": lambda plan: plan.predict_(lr=0.1, steps=1.0),
    "predict": lambda plan: plan.predict(lr=0.1, steps=1.0),
    "stash": lambda plan: plan.stash(),
    "restore_": lambda plan: plan.restore_(),
    "swap_": lambda plan: plan.swap_(),
    "stash_predict_": lambda plan: plan.stash_predict_(lr=0.1, steps=2.0),
    "extrapolate": lambda plan: plan.extrapolate(steps=1.0),
    "write_out": lambda plan: plan.write_out(),
    "sgd_step_": lambda plan: plan.sgd_step_(lr=0.1, momentum=0.9, predict=[1.0]),
}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))


def _plan(params: list[Tensor]) -> st.Plan:
    def like() -> list[Tensor]:
        return [torch.zeros_like(p) for p in params]

    return st.Plan(params, momentum_buffers=like(), stashed=like(), outs=[like()], grads=like())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("move", MOVES)
def test_parameters_that_moved_are_refused(move: str, call: str) -> None:
    model = _model()
    params: list[Tensor] = list(model.parameters())
    plan = _plan(params)
    MOVES[move](model, params[2])
    first = 0 if move in ("double", "bfloat16", "share_memory") else 2
    with pytest.raises(RuntimeError, match=rf"^params\[{first}\]: its memory is not where"):
        CALLS[call](plan)


@pytest.mark.cuda
@pytest.mark.parametrize("move", [m for m in MOVES if m != "share_memory"])
def test_parameters_that_moved_on_a_device_are_refused(move: str) -> None:
    model = _model().cuda()
    params: list[Tensor] = list(model.parameters())
    plan = _plan(params)
    plan.stash()
    MOVES[move](model, params[2])
    with pytest.raises(RuntimeError, match=r"^params\[[02]\]: its memory is not where"):
        plan.stash()
    torch.cuda.synchronize()


def test_adams_moments_that_moved_are_refused() -> None:
    w, m, u, g = (torch.ones(50) for _ in range(4))
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g)
    numbers = [Adam(0.1, (0.9, 0.99), 1e-8, 0.0, 1)]
    plan.adam_step_(numbers)
    was = w.clone()
    u.data = torch.ones(50)
    with pytest.raises(RuntimeError, match=r"^exp_avg_sqs: its memory"):
        plan.adam_step_(numbers)
    ref.assert_bits(w, was, "params")


def test_only_what_a_call_uses_has_to_be_in_place() -> None:
    w, v, kept = (torch.ones(50) for _ in range(3))
    plan = st.Plan(w, momentum_buffers=v, stashed=kept)
    kept.data = torch.ones(50)
    plan.predict_(lr=0.1, steps=1.0)
    with pytest.raises(RuntimeError, match=r"^stashed: its memory"):
        plan.stash()


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_gradients_that_moved_are_refused_until_they_are_read_again(steps_before: int) -> None:
    w, g = [torch.zeros(6), torch.zeros(300)], [torch.ones(6), torch.ones(300)]
    plan = st.Plan(w, grads=g)
    for _ in range(steps_before):
        plan.sgd_step_(lr=1.0, momentum=0.0)
    g[1].data = torch.full((300,), 5.0)
    with pytest.raises(RuntimeError, match=r"^grads\[1\]: its memory .* refresh\(\)"):
        plan.sgd_step_(lr=1.0, momentum=0.0)
    assert w[0].tolist() == [-1.0 * steps_before] * 6
    plan.refresh()
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert w[1].tolist() == [-1.0 * steps_before - 5.0] * 300


def test_a_gradient_without_memory_is_refused() -> None:
    w, g = torch.zeros(6), torch.ones(6)
    plan = st.Plan(w, grads=g)
    g.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, TypeError), match=r"^grads: "):
        plan.sgd_step_(lr=1.0, momentum=0.0)


def test_the_memory_that_was_given_lives_as_long_as_the_plan() -> None:
    p = nn.Parameter(torch.zeros(1000))
    storage = StorageWeakRef(p.untyped_storage())
    plan = st.Plan(p, stashed=torch.zeros(1000))
    p.data = torch.zeros(1000)
    gc.collect()
    assert not storage.expired()
    del plan
    gc.collect()
    assert storage.expired()


def test_a_parameter_cannot_be_swapped_away_from_under_a_plan() -> None:
    """`torch.utils.swap_tensors` checks whether anything else holds the tensor."""
    p = nn.Parameter(torch.zeros(10))
    plan = st.Plan(p, stashed=torch.zeros(10))
    with pytest.raises(RuntimeError, match="use_count"):
        torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(10)))
    del plan
    torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(10)))


def test_a_wider_gradient_at_the_same_address_must_not_reach_into_the_weights() -> None:
    memory = torch.zeros(64, dtype=torch.float32)
    narrow = memory[:8].view(torch.bfloat16)[:8]  # 16 bytes
    wide = memory[:8]  # 32 bytes from the same address
    w = memory[4:12]
    plan = st.Plan(w, grads=narrow)
    with pytest.raises(ValueError, match="grads: expected memory that the step does not write"):
        plan.refresh(wide)


class TestNegativeViews:
    """Views with the neg bit: read directly, they would reverse every step."""

    def test_of_many_elements_in_grad(self) -> None:
        p = nn.Parameter(torch.zeros(6))
        plan = st.Plan(p)
        p.grad = torch._neg_view(torch.ones(6))
        with pytest.raises(ValueError, match="grads: is a negative view"):
            plan.refresh()
        p.grad = torch.ones(6)
        plan.refresh()
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert p.tolist() == [-1.0] * 6

    def test_that_a_known_gradient_becomes(self) -> None:
        p = nn.Parameter(torch.zeros(6))
        p.grad = torch.ones(6)
        plan = st.Plan(p)
        plan.refresh()
        p.grad.data = torch._neg_view(torch.ones(6))
        with pytest.raises(ValueError, match="grads: is a negative view"):
            plan.refresh()

    def test_that_an_optimizer_is_given(self) -> None:
        p = nn.Parameter(torch.zeros(6))
        p.grad = torch._neg_view(torch.ones(6))
        st.optim.SGD([p], lr=1.0).step()
        assert p.tolist() == [1.0] * 6
