"""Tests what a Plan keeps: references, refreshed gradients, merged tensors, and few launches.

The bits of its methods are in test_calls.py, its errors in test_plan_errors.py.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bad_input import raises
from helpers.ops_calls import GroupPlan
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws

F32 = torch.float32
_SGD = laws.SgdNumbers(0.1, 0.9)
_ADAM = laws.AdamNumbers(0.01, step=4)


@pytest.mark.parametrize("name", ["sgd_step_", "adam_step_"])
def test_a_step_of_a_plan_has_the_keywords_of_the_function(name: str) -> None:
    method, function = (signature(getattr(owner, name)).parameters for owner in (st.Plan, st))
    keywords = [p for p in function.values() if p.kind is not p.POSITIONAL_OR_KEYWORD]
    (_, *mine), theirs = (
        [(p.name, p.kind, p.default, p.annotation) for p in each if p.name != "predict"]
        for each in (method.values(), keywords)
    )
    assert mine == theirs


def test_a_plan_keeps_its_tensors_alive_until_a_refresh_replaces_them() -> None:
    """Observed through the numpy arrays that own the tensors' memory."""
    arrays = [np.full(5000, float(k), dtype=np.float32) for k in range(5)]
    alive = [weakref.ref(a) for a in arrays]
    w, v, g, kept, out = (torch.from_numpy(a) for a in arrays)
    plan = st.Plan(w, momentum_buffers=v, grads=g, stashed=kept, outs=[out])
    assert repr(plan) == "Plan(params: 1, momentum_buffers, grads, stashed, outs: 1)"
    del arrays, w, v, g, kept, out
    gc.collect()
    assert all(r() is not None for r in alive)
    plan.restore_()
    first = alive[0]()
    assert first is not None and (first == 3.0).all()
    plan.refresh(torch.full((5000,), 2.0))
    gc.collect()
    assert [r() is None for r in alive] == [False, False, True, False, False]
    del first, plan
    gc.collect()
    assert all(r() is None for r in alive)


def test_gradients_not_given_are_read_from_the_parameters() -> None:
    """Whether they are the ones of a new backward, or none; given ones stay."""
    params = [torch.zeros(n, requires_grad=True) for n in (6, 3)]
    plan = st.Plan(params)
    params[0].grad = torch.ones(6)
    plan.refresh()
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert params[0].tolist() == [-1.0] * 6 and params[1].tolist() == [0.0] * 3
    params[0].grad = None
    plan.refresh()
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert params[0].tolist() == [-1.0] * 6
    (params[0] * 3).sum().backward()
    plan.refresh()
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert params[0].tolist() == [-4.0] * 6
    p = params[0]
    known, given = st.Plan(p, grads=p.grad), st.Plan(p, grads=torch.full((6,), 2.0))
    p.grad = None
    for plan in (known, given):
        plan.refresh()
        plan.sgd_step_(lr=1.0, momentum=0.0)
    assert p.tolist() == [-6.0] * 6


def test_a_refresh_reads_some_gradients_from_the_parameters() -> None:
    params = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    plan = st.Plan(params, grads=[None, torch.full((2,), 2.0)])
    for p in params:
        p.grad = torch.ones(2)
    plan.refresh()
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert [p.tolist() for p in params] == [[-1.0] * 2, [-2.0] * 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.t_(),
        lambda grad: grad.resize_(3, 3),
        lambda grad: grad.resize_(4),
        lambda grad: setattr(grad, "data", grad.double()),
    ],
    ids=["transposed", "resized", "flat", "double"],
)
@pytest.mark.parametrize("steps", range(4))
def test_a_refresh_refuses_a_gradient_that_changed_in_place(change: Any, steps: int) -> None:
    """It is the same object, maybe at the same address. From the third step on it is watched."""
    w, g = torch.zeros(2, 2), torch.ones(2, 2)
    plan = st.Plan(w, grads=g)
    for _ in range(steps):
        plan.refresh()
        plan.sgd_step_(lr=1.0, momentum=0.0)
    change(g)
    with pytest.raises(ValueError, match="grads: expected"):
        plan.refresh()
    assert torch.equal(w, torch.full((2, 2), -float(steps)))


@pytest.mark.parametrize("steps", range(4))
def test_a_refresh_follows_a_replaced_storage(steps: int) -> None:
    w, g, empty = torch.zeros(2), torch.ones(2), torch.zeros(0)
    plan = st.Plan([w, empty, w.clone()], grads=[g, empty.clone(), None])
    for _ in range(steps):
        plan.refresh()
        plan.sgd_step_(lr=1.0, momentum=0.0)
    g.data = torch.full((2,), 3.0)
    plan.refresh()
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert w.tolist() == [-3.0 - steps] * 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"betas": 0.9}, "betas: expected a pair of numbers"),
        ({"lr": -1.0}, "lr: expected a finite number >= 0"),
        ({"predict": [-1.0]}, r"predict\[0\]: expected"),
        ({"step": 0}, "step: expected a whole number"),
    ],
)
def test_a_wrong_adam_step_is_refused_again(wrong: dict[str, Any], words: str) -> None:
    w, g, m, u, out = (torch.ones(2) for _ in range(5))
    plan = st.Plan(w, grads=g, exp_avgs=m, exp_avg_sqs=u, outs=[out])
    plan.adam_step_(lr=0.0, step=1)
    for _ in range(4):
        with pytest.raises((TypeError, ValueError), match=words):
            plan.adam_step_(**{"lr": 0.5, "step": 1, **wrong})
    assert torch.equal(w, torch.ones(2)) and torch.equal(out, torch.ones(2))


def test_an_adam_step_follows_its_numbers() -> None:
    """Numbers that are the same objects are checked once: tensors among them may change."""
    lr, betas = torch.tensor(0.5), (0.0, 0.0)
    for k in range(1, 5):
        w, g, m, u = torch.zeros(1), torch.ones(1), torch.zeros(1), torch.zeros(1)
        plan = st.Plan(w, grads=g, exp_avgs=m, exp_avg_sqs=u, outs=[torch.zeros(1)])
        for step in range(1, k + 1):
            plan.adam_step_(lr=lr, betas=betas, eps=0.0, step=step, predict=[1])  # type: ignore[arg-type]
        lr.fill_(0.25)
        plan.adam_step_(lr=lr, betas=betas, eps=0.0, step=k + 1)  # type: ignore[arg-type]
        lr.fill_(0.5)
        assert w.item() == -0.5 * k - 0.25
        for wrong in (0, 1.5, "2"):
            with pytest.raises((TypeError, ValueError), match="step: expected"):
                plan.adam_step_(lr=0.5, betas=betas, step=wrong)  # type: ignore[arg-type]


def test_gradients_that_move_after_a_capture() -> None:
    """A captured step and its plan: the graph keeps reading the old gradients."""
    w, v, g = ([torch.randn(3), torch.randn(2)] for _ in range(3))
    plan = st.Plan(w, momentum_buffers=v, grads=g)
    plan.refresh([g[0].clone(), g[1]])
    plan.refresh(g)
    plan._native.pin_gradients()
    plan.refresh(list(g))  # unchanged
    for moved in ([g[0], g[1].clone()], [g[0], None]):
        with pytest.raises(RuntimeError, match=r"grads\[1\]: .*captured in a CUDA graph"):
            plan.refresh(moved)


def _apart(*counts: int) -> list[list[Tensor]]:
    return [[torch.rand(10) for _ in range(n)] for n in counts]


def _flat(n: int, count: int) -> list[list[Tensor]]:
    return [list(torch.rand(10 * n).split(10)) for _ in range(count)]


def _of_types(*types: torch.dtype) -> list[list[Tensor]]:
    return [[t.to(d) for t, d in zip(ts, types, strict=True)] for ts in _apart(*[len(types)] * 5)]


_FAR = laws.Geometric(32)


@pytest.mark.parametrize(
    ("lists", "groups", "step", "launches"),
    [
        # Launches, and rows: tensors merge that lie side by side in every list, with equal flags.
        (_apart(*[300] * 5), None, {}, (1, 300)),
        (_flat(300, 5), None, {}, (1, 1)),
        ([*_flat(300, 4), *_apart(300)], None, {}, (1, 300)),
        (_flat(4, 5), None, {"first_step": [True, True, False, True]}, (1, 3)),
        (_flat(6, 5), [0, 0, 1, 1, 1, 0], {}, (1, 3)),
        (_apart(*[300] * 5), [i % 40 for i in range(300)], {}, (1, 300)),
        (_of_types(F32, torch.float64, F32, torch.bfloat16), None, {}, (3, 4)),
        # As many passes as the predictions need.
        (_apart(*[1] * 13), None, {"predict": [1.0] * 8}, (1, 1)),
        (_apart(*[1] * 13), None, {"predict": [1.0] * 9}, (2, 2)),
        (_apart(*[1] * 13), None, {"predict": [_FAR, _FAR], "adam": True}, (1, 1)),
        (_apart(*[1] * 13), None, {"predict": [_FAR, laws.Geometric(33)], "adam": True}, (2, 2)),
        (_apart(*[1] * 13), None, {"predict": [laws.Geometric(50)] * 8}, (1, 1)),
    ],
)
def test_a_step_is_few_launches(
    lists: list[list[Tensor]], groups: Any, step: dict[str, Any], launches: tuple[int, int]
) -> None:
    w, g, m, u, *outs = lists
    groups = groups or [0] * len(w)
    plan = GroupPlan(groups, w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=outs)
    options = {"predict": [2.0], **step}
    numbers = _ADAM if options.pop("adam", False) else _SGD
    plan.step([numbers] * (max(groups) + 1), **options)
    assert plan._native.last_launch() == launches


def test_more_second_order_predictions_than_one_pass_writes_are_refused() -> None:
    """The gradient is gone by the second pass; outputs of several types take passes too."""
    second = laws.SecondOrder(2.0, 1.0)
    for types in ([F32] * 9, [F32, torch.bfloat16]):
        w, g, v = (torch.rand(30) for _ in range(3))
        outs = [torch.zeros(30, dtype=dtype) for dtype in types]
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=outs)
        step = partial(plan.sgd_step_, lr=0.1, momentum=0.9, predict=[second] * len(outs))
        raises(ValueError, "second-order", step, (w, v, outs))


def test_a_group_without_tensors_has_numbers_all_the_same() -> None:
    w = [torch.zeros(3), torch.zeros(3)]
    plan = GroupPlan([0, 2], w, grads=[torch.ones(3)] * 2)
    plan.step([laws.SgdNumbers(1.0, 0.0), laws.SgdNumbers(7.0, 0.0), laws.SgdNumbers(3.0, 0.0)])
    assert [t.tolist() for t in w] == [[-1.0] * 3, [-3.0] * 3]
    with pytest.raises(ValueError, match="in all groups, or in none"):
        plan.step([laws.SgdNumbers(1.0, 0.0), laws.SgdNumbers(7.0, 0.9), laws.SgdNumbers(3.0, 0.0)])
