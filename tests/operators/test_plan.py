"""Tests what a Plan keeps: references, refreshed gradients, merged tensors, and few launches.

The bits of its methods are in test_calls.py, its errors in test_plan_errors.py.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.bad_input import raises
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws

_SGD = laws.Sgd(0.1, 0.9)
_ADAM = laws.Adam(0.01, step=4)


def test_a_plan_keeps_its_tensors_alive_until_a_refresh_replaces_them() -> None:
    """Observed through the numpy arrays that own the tensors' memory."""
    arrays = [np.full(5000, float(k), dtype=np.float32) for k in range(5)]
    alive = [weakref.ref(a) for a in arrays]
    w, v, g, kept, out = (torch.from_numpy(a) for a in arrays)
    plan = st.Plan(w, momentum_buffers=v, grads=g, stashed=kept, outs=[out])
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


class TestRefresh:
    """refresh re-reads only the gradients."""

    @staticmethod
    def _leaf(n: int = 6) -> Tensor:
        return torch.zeros(n, requires_grad=True)

    @staticmethod
    def _step(plan: st.Plan) -> None:
        plan.sgd_step_(lr=1.0, momentum=0.0)

    def test_gradients_not_given_are_read_from_the_parameters(self) -> None:
        params = [self._leaf(), self._leaf(3)]
        plan = st.Plan(params)
        params[0].grad = torch.ones(6)
        plan.refresh()
        self._step(plan)
        assert params[0].tolist() == [-1.0] * 6 and params[1].tolist() == [0.0] * 3

    def test_zero_grad_set_to_none_and_a_new_backward(self) -> None:
        p = self._leaf()
        p.grad = torch.ones(6)
        plan = st.Plan(p, grads=p.grad)
        self._step(plan)
        p.grad = None
        plan.refresh()
        self._step(plan)
        assert p.tolist() == [-1.0] * 6
        (p * 3).sum().backward()
        plan.refresh()
        self._step(plan)
        assert p.tolist() == [-4.0] * 6

    def test_a_tensor_given_that_was_not_the_grad_stays(self) -> None:
        p, own = self._leaf(), torch.full((6,), 2.0)
        p.grad = torch.ones(6)
        plan = st.Plan(p, grads=own)
        p.grad = None
        plan.refresh()
        self._step(plan)
        assert p.tolist() == [-2.0] * 6

    def test_many_real_steps(self) -> None:
        """Autograd hands out gradients whose strides differ in dimensions of size one."""
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(16, 1)
        ).to(torch.float64, memory_format=torch.channels_last)  # type: ignore[call-overload]
        twin = copy.deepcopy(model)
        params = list(model.parameters())
        plan = st.Plan(params, momentum_buffers=[torch.zeros_like(p) for p in params])
        opt = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        for step in range(20):
            x = torch.randn(4, 1, 4, 4, dtype=torch.float64)
            for m in (model, twin):
                m.zero_grad(set_to_none=True)
                m(x).square().mean().backward()
            plan.refresh()
            plan.sgd_step_(lr=0.05, momentum=0.9, first_step=step == 0)
            opt.step()
        for a, b in zip(params, twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(
        ("bad", "name"),
        [([torch.full((6,), 9.0), torch.ones(5)], r"grads\[1\]"), ([torch.ones(6)], "grads")],
    )
    def test_what_is_refused_leaves_the_old_ones(self, bad: list[Tensor], name: str) -> None:
        w = [torch.zeros(6), torch.zeros(6)]
        plan = st.Plan(w, grads=[torch.ones(6), torch.ones(6)])
        raises(ValueError, name, lambda: plan.refresh(bad), w)
        self._step(plan)
        assert w[0].tolist() == [-1.0] * 6 and w[1].tolist() == [-1.0] * 6

    def test_gradients_that_move_after_a_capture(self) -> None:
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
        others = [[t.clone() for t in x] for x in (w, g, v)]
        plan.sgd_step_(lr=0.1, momentum=0.9)
        st.sgd_step_(*others, lr=0.1, momentum=0.9)
        ref.assert_lists(w, others[0], "params", exact=True)


class TestLaunches:
    """The cost of a call: launches, and rows after merging."""

    @staticmethod
    def _apart(*counts: int) -> list[list[Tensor]]:
        return [[torch.rand(5) for _ in range(n)] for n in counts]

    @staticmethod
    def _flat(n: int, count: int) -> list[list[Tensor]]:
        return [list(torch.rand(10 * n).split(10)) for _ in range(count)]

    @staticmethod
    def _plan(lists: list[list[Tensor]], **more: Any) -> st.Plan:
        w, g, m, u, *outs = lists
        return st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=outs, **more)

    def test_rows(self) -> None:
        """Tensors merge that are adjacent in every list and have the same flags and group."""
        partly = [*self._flat(300, 4), [torch.rand(10) for _ in range(300)]]
        types = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
        mixed = [[t.to(d) for t, d in zip(ts, types, strict=True)] for ts in self._apart(*[4] * 5)]
        flags = [True, True, False, True]
        for lists, groups, options, expected in (
            (self._apart(*[300] * 5), None, {}, (1, 300)),
            (self._flat(300, 5), None, {}, (1, 1)),
            (partly, None, {}, (1, 300)),
            (self._flat(4, 5), None, {"first_step": flags}, (1, 3)),
            (self._flat(6, 5), [0, 0, 1, 1, 1, 0], {}, (1, 3)),
            (mixed, None, {}, (3, 4)),  # a launch per combination of types
        ):
            plan = self._plan(lists, groups=groups)
            plan.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0], **options)
            assert plan._native.last_launch() == expected

    @pytest.mark.parametrize("n", [1, 2, 40])
    def test_any_number_of_groups_is_one_launch(self, n: int) -> None:
        plan = self._plan(self._apart(*[300] * 5), groups=[i % n for i in range(300)])
        adams = [laws.Adam(0.1 / (k + 1), step=1) for k in range(n)]
        sgds = [laws.Sgd(0.1 / (k + 1), 0.9) for k in range(n)]
        for call in (
            lambda: plan.adam_step_(adams, predict=[3.0]),
            lambda: plan.sgd_step_(sgds, predict=[3.0]),
            lambda: plan.predict(sgds, steps=2.0),
            lambda: plan.predict(adams, steps=laws.Geometric(5)),
        ):
            call()
            assert plan._native.last_launch() == (1, 300)

    def test_passes_that_are_not_needed_are_not_made(self) -> None:
        plan = self._plan(self._apart(*[1] * 13))
        far = laws.Geometric(32)
        for predict, passes in (
            ([1.0] * 8, 1), ([1.0] * 9, 2), ([far, far], 1), ([far, laws.Geometric(33)], 2)
        ):  # fmt: skip
            plan.adam_step_([_ADAM], predict=predict)
            assert plan._native.last_launch() == (passes, passes)
        plan.sgd_step_([_SGD], predict=[laws.Geometric(50)] * 8)
        assert plan._native.last_launch() == (1, 1)

    def test_outputs_of_three_types_take_no_more_passes_than_types(self) -> None:
        types = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32)
        lists = self._apart(*[1] * 9)
        lists[4:] = [[t.to(d) for t in ts] for ts, d in zip(lists[4:], types, strict=True)]
        plan = self._plan(lists)
        for step in (lambda p: plan.sgd_step_([_SGD], predict=p),
                     lambda p: plan.adam_step_([_ADAM], predict=p)):  # fmt: skip
            step([1.0, 2.0, 3.0, 4.0, 5.0])
            assert plan._native.last_launch()[0] <= 4


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_second_order_goes_first_wherever_it_is(rule: str) -> None:
    """The gradient is gone by the second pass; more of them than one pass writes are refused."""
    start = [torch.rand(30) for _ in range(4)]

    def made(n: int) -> tuple[list[Tensor], Any]:
        w, g, v, u = (t.clone() for t in start)
        outs = [torch.zeros(30) for _ in range(n)]
        plan = st.Plan(w, exp_avgs=v, exp_avg_sqs=u, grads=g, outs=outs)
        if rule == "sgd":
            return [*outs, w, v], lambda predict: plan.sgd_step_([_SGD], predict=predict)
        return [*outs, w, v, u], lambda predict: plan.adam_step_([_ADAM], predict=predict)

    second = laws.SecondOrder(2.0, 1.0)
    first, step = made(10)
    step([second] + [1.0] * 9)
    for at in (1, 7, 8):
        outs, step = made(10)
        step([1.0] * at + [second] + [1.0] * (9 - at))
        moved = [outs[at], *outs[:at], *outs[at + 1 :]]
        ref.assert_lists(moved, first, f"at {at}", exact=True)
    lists, step = made(9)
    raises(ValueError, "second-order", lambda: step([second] * 9), lists)
    w, g, v = (torch.rand(30) for _ in range(3))
    outs = [torch.zeros(30), torch.zeros(30, dtype=torch.bfloat16)]
    plan = st.Plan(w, momentum_buffers=v, grads=g, outs=outs)
    several = [second, second]  # into several types, which also takes passes
    raises(
        ValueError, "second-order", lambda: plan.sgd_step_([_SGD], predict=several), (w, v, outs)
    )


def test_a_group_without_tensors_has_numbers_all_the_same() -> None:
    for groups in ((0, 2), np.array([0, 2]), range(0, 3, 2)):
        w = [torch.zeros(3), torch.zeros(3)]
        plan = st.Plan(w, grads=[torch.ones(3)] * 2, groups=groups)  # type: ignore[arg-type]
        plan.sgd_step_([laws.Sgd(1.0, 0.0), laws.Sgd(7.0, 0.0), laws.Sgd(3.0, 0.0)])
        assert [t.tolist() for t in w] == [[-1.0] * 3, [-3.0] * 3]
