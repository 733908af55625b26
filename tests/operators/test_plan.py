"""Tests Plan: the operators' bits, references kept, refreshes, and errors."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref

import hypothesis.strategies as hs
import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.ops_tensors import Case, cases, check_guards, horizons, rates, tensors
from hypothesis import given
from torch import Tensor

import spectrain_ext as st


@given(case=cases(), lr=rates(), steps=horizons())
def test_every_method_gives_the_bits_of_its_operator(case: Case, lr: float, steps: float) -> None:
    def build() -> list[list[Tensor]]:
        return [tensors(case.stream(i, momentum=i == 1)) for i in range(6)]

    def one(x: list[Tensor]) -> list[Tensor] | Tensor:
        return x[0] if case.single else x

    w, v, g, kept, out0, out1 = mine = build()
    plan = st.Plan(
        one(w),
        momentum_buffers=one(v),
        grads=one(g),
        stashed=one(kept),
        outs=[one(out0), one(out1)],
    )
    a, b, c, d, e, f = theirs = build()

    def same(what: str) -> None:
        for k, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            ref.assert_lists(x, y, f"after {what}: list {k}")

    plan.stash()
    st.stash(a, d)
    same("stash")
    plan.predict_(lr=lr, steps=steps)
    st.predict_(a, b, lr=lr, steps=steps)
    same("predict_")
    plan.predict(lr=lr, steps=steps, out=1)
    st.predict(a, b, lr=lr, steps=steps, out=f)
    same("predict")
    plan.swap_()
    st.swap_(a, d)
    same("swap_")
    plan.restore_()
    st.restore_(a, d)
    same("restore_")
    plan.stash_predict_(lr=lr, steps=steps)
    st.stash_predict_(a, d, b, lr=lr, steps=steps)
    same("stash_predict_")
    plan.sgd_step_(lr=lr, momentum=0.9, dampening=0.1, weight_decay=0.01, predict=[steps, None])
    st.sgd_step_(
        a, c, b, lr=lr, momentum=0.9, dampening=0.1, weight_decay=0.01, predict=[(steps, e)]
    )
    same("sgd_step_, one of two outs")
    plan.sgd_step_(lr=lr, momentum=0.9, nesterov=True, maximize=True, predict=[1.0, steps])
    st.sgd_step_(
        a, c, b, lr=lr, momentum=0.9, nesterov=True, maximize=True, predict=[(1.0, e), (steps, f)]
    )
    same("sgd_step_, both outs")


@given(case=cases(min_size=1, single=False), data=hs.data())
def test_first_step_per_tensor_and_missing_gradients(case: Case, data: hs.DataObject) -> None:
    n = len(case.rows)
    w, g, v, out = (case.stream(i, momentum=i == 2) for i in range(4))
    keep = data.draw(hs.lists(hs.booleans(), min_size=n, max_size=n))
    first = data.draw(hs.lists(hs.booleans(), min_size=n, max_size=n))
    grads = [t if k else None for t, k in zip(tensors(g), keep, strict=True)]
    hyper = ref.SGD(lr=0.1, momentum=0.9, dampening=0.2)
    expected = [
        hyper.step(*row[:3], first=row[3])
        for row in zip(tensors(w), grads, tensors(v), first, strict=True)
    ]
    plan = st.Plan(tensors(w), momentum_buffers=tensors(v), grads=grads, outs=[tensors(out)])
    plan.sgd_step_(first_step=first, predict=[2.0], **hyper.keywords())
    ref.assert_lists(tensors(w), [a for a, _ in expected], "params")
    ref.assert_lists(tensors(v), [b for _, b in expected if b is not None], "momentum_buffers")
    for i, k in enumerate(keep):
        later = st.predict(tensors(w)[i], tensors(v)[i], lr=0.1, steps=2.0 if k else 0.0)
        ref.assert_same(tensors(out)[i], later, f"outs[0][{i}]")
    check_guards(params=w, grads=g, momentum_buffers=v, outs=out)


def test_an_out_that_is_not_asked_for_is_left_alone() -> None:
    w, g, v, a, b = (torch.randn(9) for _ in range(5))
    was = a.clone()
    plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[a, b])
    plan.sgd_step_(lr=0.1, momentum=0.9, predict=[None, 3.0])
    ref.assert_bits(a, was, "outs[0]")
    ref.assert_bits(b, st.predict(w, v, lr=0.1, steps=3.0), "outs[1]")
    plan.sgd_step_(lr=0.1, momentum=0.9)
    ref.assert_bits(a, was, "outs[0]")


def test_an_empty_plan() -> None:
    plan = st.Plan([], momentum_buffers=[], grads=[], stashed=[], outs=[[]])
    plan.predict_(lr=0.1, steps=1.0)
    plan.predict(lr=0.1, steps=1.0)
    plan.stash()
    plan.restore_()
    plan.swap_()
    plan.stash_predict_(lr=0.1, steps=1.0)
    plan.sgd_step_(lr=0.1, momentum=0.9, predict=[1.0])
    plan.refresh()


class TestLaunches:
    """The cost of a call: launches, and rows after merging."""

    @staticmethod
    def _step(lists: list[list[Tensor]], **options: object) -> tuple[int, int]:
        w, v, g, out = lists
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
        plan.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0], **options)  # type: ignore[arg-type]
        return plan._native.last_launch()

    def test_hundreds_of_tensors_are_one_launch(self) -> None:
        assert self._step([[torch.randn(5) for _ in range(300)] for _ in range(4)]) == (1, 300)

    def test_views_of_flat_buffers_are_one_row(self) -> None:
        assert self._step([list(torch.randn(3000).split(10)) for _ in range(4)]) == (1, 1)

    def test_what_touches_in_some_streams_only_stays_apart(self) -> None:
        flat = [list(torch.randn(3000).split(10)) for _ in range(3)]
        assert self._step([*flat, [torch.randn(10) for _ in range(300)]]) == (1, 300)

    def test_rows_with_other_flags_stay_apart(self) -> None:
        flat = [list(torch.randn(40).split(10)) for _ in range(4)]
        assert self._step(flat, first_step=[True, True, False, True]) == (1, 3)

    def test_one_launch_per_combination_of_types(self) -> None:
        dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
        lists = [[torch.randn(5).to(d) for d in dtypes] for _ in range(4)]
        assert self._step(lists) == (3, 4)


def test_hyper_parameters_may_change_from_call_to_call() -> None:
    w, v = torch.zeros(4), torch.ones(4)
    plan = st.Plan(w, momentum_buffers=v)
    plan.predict_(lr=1.0, steps=1.0)
    plan.predict_(lr=0.5, steps=4.0)
    assert w.tolist() == [-3.0] * 4


def test_a_plan_sees_values_as_they_are_when_it_runs() -> None:
    w, v = torch.zeros(4), torch.zeros(4)
    plan = st.Plan(w, momentum_buffers=v)
    v.fill_(2.0)
    w.fill_(1.0)
    plan.predict_(lr=1.0, steps=1.0)
    assert w.tolist() == [-1.0] * 4


def test_a_plan_keeps_its_tensors_alive() -> None:
    """Observed through the numpy arrays that own the tensors' memory."""
    arrays = [np.full(5000, float(k), dtype=np.float32) for k in range(5)]
    alive = [weakref.ref(a) for a in arrays]
    w, v, g, kept, out = (torch.from_numpy(a) for a in arrays)
    plan = st.Plan(w, momentum_buffers=[v][0], grads=g, stashed=kept, outs=[out])
    del arrays, w, v, g, kept, out
    gc.collect()
    assert all(r() is not None for r in alive)
    plan.restore_()
    first = alive[0]()
    assert first is not None and (first == 3.0).all()
    del first, plan
    gc.collect()
    assert all(r() is None for r in alive)


def test_tensors_that_a_refresh_replaces_are_let_go() -> None:
    array = np.ones(10, dtype=np.float32)
    alive = weakref.ref(array)
    grad = torch.from_numpy(array)
    plan = st.Plan(torch.zeros(10), momentum_buffers=torch.zeros(10), grads=grad)
    del array, grad
    gc.collect()
    assert alive() is not None
    plan.refresh(torch.full((10,), 2.0))
    gc.collect()
    assert alive() is None


class TestRefresh:
    """refresh re-reads only the gradients."""

    @staticmethod
    def _leaf(n: int = 6) -> Tensor:
        return torch.zeros(n, requires_grad=True)

    def test_gradients_not_given_are_read_from_the_parameters(self) -> None:
        params = [self._leaf(), self._leaf(3)]
        plan = st.Plan(params)
        params[0].grad = torch.ones(6)
        plan.refresh()
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert params[0].tolist() == [-1.0] * 6 and params[1].tolist() == [0.0] * 3

    def test_zero_grad_set_to_none_and_a_new_backward(self) -> None:
        p = self._leaf()
        p.grad = torch.ones(6)
        plan = st.Plan(p, grads=p.grad)
        plan.sgd_step_(lr=1.0, momentum=0.0)
        p.grad = None
        plan.refresh()
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert p.tolist() == [-1.0] * 6
        (p * 3).sum().backward()
        plan.refresh()
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert p.tolist() == [-4.0] * 6

    def test_a_tensor_given_that_was_not_the_grad_stays(self) -> None:
        p, own = self._leaf(), torch.full((6,), 2.0)
        p.grad = torch.ones(6)
        plan = st.Plan(p, grads=own)
        p.grad = None
        plan.refresh()
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert p.tolist() == [-2.0] * 6

    def test_gradients_given_become_the_gradients(self) -> None:
        params = [self._leaf(), self._leaf()]
        plan = st.Plan(params, grads=[torch.ones(6), torch.ones(6)])
        plan.refresh([None, torch.full((6,), 5.0)])
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert params[0].tolist() == [0.0] * 6 and params[1].tolist() == [-5.0] * 6

    def test_many_real_steps(self) -> None:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
        model = model.double()
        twin = copy.deepcopy(model)
        params = list(model.parameters())
        plan = st.Plan(params, momentum_buffers=[torch.zeros_like(p) for p in params])
        opt = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        for step in range(20):
            x = torch.randn(4, 5, dtype=torch.float64)
            for m in (model, twin):
                m.zero_grad(set_to_none=True)
                m(x).square().mean().backward()
            plan.refresh()
            plan.sgd_step_(lr=0.05, momentum=0.9, first_step=step == 0)
            opt.step()
        for a, b in zip(params, twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)

    def test_autograds_gradient_strides(self) -> None:
        """Dimensions of size one may have any stride in a gradient that autograd hands out."""
        conv = torch.nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        plan = st.Plan(list(conv.parameters()))
        before = [p.detach().clone() for p in conv.parameters()]
        conv(torch.randn(2, 1, 8, 8)).square().sum().backward()
        plan.refresh()
        plan.sgd_step_(lr=0.5, momentum=0.0)
        for p, was in zip(conv.parameters(), before, strict=True):
            assert p.grad is not None
            ref.assert_same(p.detach(), ref.SGD(0.5, 0.0).step(was, p.grad, None)[0], "param")

    def test_a_bad_gradient_is_refused_and_the_old_ones_stay(self) -> None:
        w = [torch.zeros(6), torch.zeros(6)]
        plan = st.Plan(w, grads=[torch.ones(6), torch.ones(6)])
        with pytest.raises(ValueError, match=r"grads\[1\]"):
            plan.refresh([torch.full((6,), 9.0), torch.ones(5)])
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert w[0].tolist() == [-1.0] * 6 and w[1].tolist() == [-1.0] * 6

    def test_a_list_of_another_length_is_refused(self) -> None:
        plan = st.Plan([torch.zeros(6)], grads=[torch.ones(6)])
        with pytest.raises(ValueError, match="grads"):
            plan.refresh([torch.ones(6), torch.ones(6)])


class TestRefuses:
    """Errors for arguments that the Plan was not built with."""

    def test_pickle_and_copies(self) -> None:
        plan = st.Plan(torch.zeros(3), stashed=torch.zeros(3))
        with pytest.raises(TypeError, match="Plan"):
            pickle.dumps(plan)
        with pytest.raises(TypeError, match="Plan"):
            copy.deepcopy(plan)

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda p: p.predict_(lr=0.1, steps=1.0), "momentum_buffers"),
            (lambda p: p.predict(lr=0.1, steps=1.0), "outs|momentum_buffers"),
            (lambda p: p.stash_predict_(lr=0.1, steps=1.0), "stashed|momentum_buffers"),
            (lambda p: p.stash(), "stashed"),
            (lambda p: p.restore_(), "stashed"),
            (lambda p: p.swap_(), "stashed"),
            (lambda p: p.sgd_step_(lr=0.1, momentum=0.9), "momentum_buffers"),
        ],
    )
    def test_a_stream_that_is_missing(self, call, name: str) -> None:  # type: ignore[no-untyped-def]
        w = torch.randn(4)
        before = w.clone()
        plan = st.Plan(w, grads=torch.ones(4))
        with pytest.raises(ValueError, match=name):
            call(plan)
        ref.assert_bits(w, before, "params")

    @pytest.mark.parametrize("value", [-1.0, math.nan, -0.001])
    @pytest.mark.parametrize("name", ["lr", "steps"])
    def test_negative_and_nan(self, name: str, value: float) -> None:
        w, v, kept, out = (torch.randn(4) for _ in range(4))
        before = [t.clone() for t in (w, v, kept, out)]
        plan = st.Plan(w, momentum_buffers=v, stashed=kept, outs=[out])
        arguments = {"lr": 0.1, "steps": 1.0, name: value}
        for method in (plan.predict_, plan.predict, plan.stash_predict_):
            with pytest.raises(ValueError, match=name):
                method(**arguments)
        ref.assert_lists([w, v, kept, out], before, "tensors", exact=True)

    @pytest.mark.parametrize("predict", [[-1.0], [math.nan], [1.0, 1.0], [1.0, None]])
    def test_predictions_that_cannot_be(self, predict: list[float | None]) -> None:
        w, v, g, out = (torch.randn(4) for _ in range(4))
        before = [t.clone() for t in (w, v, g, out)]
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
        with pytest.raises(ValueError, match="predict"):
            plan.sgd_step_(lr=0.1, momentum=0.9, predict=predict)
        ref.assert_lists([w, v, g, out], before, "tensors", exact=True)

    def test_predictions_without_momentum(self) -> None:
        w, v, g, out = (torch.randn(4) for _ in range(4))
        before = [t.clone() for t in (w, v, g, out)]
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
        with pytest.raises(ValueError, match="momentum"):
            plan.sgd_step_(lr=0.1, momentum=0.0, predict=[1.0])
        ref.assert_lists([w, v, g, out], before, "tensors", exact=True)

    def test_an_out_that_does_not_exist(self) -> None:
        plan = st.Plan(torch.zeros(3), momentum_buffers=torch.zeros(3), outs=[torch.zeros(3)])
        with pytest.raises((IndexError, ValueError), match="out"):
            plan.predict(lr=0.1, steps=1.0, out=1)

    def test_first_step_of_another_length(self) -> None:
        w, v, g = ([torch.zeros(3), torch.zeros(3)] for _ in range(3))
        plan = st.Plan(w, momentum_buffers=v, grads=g)
        with pytest.raises(ValueError, match="first_step"):
            plan.sgd_step_(lr=0.1, momentum=0.9, first_step=[True])

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
