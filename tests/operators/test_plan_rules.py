"""Tests plans of every rule: predictions in place, into outs, with a stash; many outs and terms."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as hs
import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.bad_input import raises
from helpers.ops_reference import fma, narrow, scalars_like, widen
from helpers.ops_rules import predict_adam, predict_sgd
from helpers.ops_tensors import DTYPES, Case, as_list, cases, check_guards, horizons, tensors
from hypothesis import given
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.laws import Geometric, Law, Linear, SecondOrder
from spectrain_ext.operators.numbers import Adam, Sgd

_ADAM = Adam(0.01, (0.9, 0.99), 1e-8, 0.1, 4, decoupled_weight_decay=True)
_SGD = Sgd(0.1, 0.9, nesterov=True)


@given(case=cases(), law=hs.sampled_from([Linear(0.0), Linear(2.5), Geometric(0), Geometric(4)]))
def test_stash_predict_of_groups(case: Case, law: Law) -> None:
    """Stashed <- W and W <- the prediction, with Adam and with SGD."""
    for adam in (False, True):
        w, v, u, kept = (case.stream(i, momentum=i in (1, 2)) for i in range(4))
        for t in tensors(u):
            t.abs_()
        before = [ref.clone(t) for t in tensors(w)]
        state = [ref.clone(t) for t in tensors(v) + tensors(u)]
        rows = list(zip(before, tensors(v), tensors(u), strict=True))
        if adam:
            expected = [predict_adam(law.adam(_ADAM), *row, eps=_ADAM.eps) for row in rows]
        else:
            expected = [predict_sgd(law.sgd(_SGD), a, b) for a, b, _ in rows]
        plan = st.Plan(
            case.given(w), exp_avgs=case.given(v), exp_avg_sqs=case.given(u),
            stashed=case.given(kept),
        )  # fmt: skip
        plan.stash_predict_([_ADAM] if adam else [_SGD], steps=law)
        ref.assert_lists(tensors(kept), before, "stashed", exact=True)
        ref.assert_lists(tensors(w), expected, "params", exact=law in (Linear(0.0), Geometric(0)))
        ref.assert_lists(tensors(v) + tensors(u), state, "state", exact=True)
        plan.restore_()
        ref.assert_lists(tensors(w), before, "restored", exact=True)
        check_guards(w=w, v=v, u=u, kept=kept)


@given(case=cases(), steps=horizons())
def test_predict_of_groups_is_predict(case: Case, steps: float) -> None:
    """SGD's numbers in a list, and one by one."""
    w, v, out = (case.stream(i, momentum=i == 1) for i in range(3))
    plan = st.Plan(case.given(w), momentum_buffers=case.given(v), outs=[case.given(out)])
    plan.predict([Sgd(0.05, 0.9)], steps=steps)
    expected = as_list(st.predict(case.given(w), case.given(v), lr=0.05, steps=steps))
    ref.assert_lists(tensors(out), expected, "out", exact=steps == 0)


def _extrapolated(w: Tensor, previous: Tensor, steps: float) -> Tensor:
    """W + steps*(W - previous): the difference rounded, then one fma."""
    wide = widen(w)
    with np.errstate(all="ignore"):
        difference = wide - widen(previous)
        return narrow(fma(scalars_like(wide)(steps), difference, wide), w)


class TestExtrapolate:
    """W + T*(W - W_prev)."""

    @given(case=cases(), steps=horizons())
    def test_bits(self, case: Case, steps: float) -> None:
        w, previous, out = case.stream(0), case.stream(1), case.stream(2)
        before = [ref.clone(t) for t in tensors(w) + tensors(previous)]
        expected = tensors(w)
        if steps:
            expected = [
                _extrapolated(*row, steps)
                for row in zip(tensors(w), tensors(previous), strict=True)
            ]
        given_out = case.given(out)
        result = st.extrapolate(case.given(w), case.given(previous), steps=steps, out=given_out)
        assert isinstance(result, Tensor) == case.single
        ref.assert_lists(tensors(out), expected, "out", exact=steps == 0)
        ref.assert_lists(tensors(w) + tensors(previous), before, "inputs", exact=True)
        fresh = st.extrapolate(case.given(w), case.given(previous), steps=steps)
        ref.assert_lists(as_list(fresh), expected, "result", exact=steps == 0)
        check_guards(w=w, previous=previous, out=out)

    def test_is_linear_prediction_where_the_momentum_is_the_difference(self) -> None:
        """After a step without earlier momentum, lr*v = W_prev - W."""
        w, g, v = (torch.randn(50, dtype=torch.float64) for _ in range(3))
        previous = w.clone()
        st.sgd_step_(w, g, v, lr=0.1, momentum=0.9)
        expected = st.predict(w, v, lr=0.1, steps=3.0)
        torch.testing.assert_close(st.extrapolate(w, previous, steps=3.0), expected)

    def test_of_a_plan_takes_the_stash(self) -> None:
        w, kept, out, other = (torch.randn(20) for _ in range(4))
        plan = st.Plan(w, stashed=kept, outs=[other.clone(), out])
        plan.extrapolate(steps=2.0, out=1)
        ref.assert_same(out, _extrapolated(w, kept, 2.0), "outs[1]")

    @pytest.mark.parametrize("steps", [-1.0, math.nan, math.inf])
    def test_steps_out_of_range(self, steps: float) -> None:
        w, kept, out = (torch.randn(20) for _ in range(3))
        raises(
            ValueError, "^steps", lambda: st.extrapolate(w, kept, steps=steps, out=out), (w, out)
        )


class TestManyOutputs:
    """More outputs than one kernel writes, and more terms than one launch holds."""

    @pytest.mark.parametrize("count", [1, 8, 9, 17])
    @pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[5]], ids=str)
    def test_of_adam(self, count: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        w, g = (torch.randn(1000).to(dtypes[0]) for _ in range(2))
        m, u = torch.randn(1000).to(dtypes[1]), torch.rand(1000).to(dtypes[1])
        chosen: list[Law] = [
            Geometric(3) if j % 3 == 0 else Linear(float(j % 5)) for j in range(count)
        ]
        outs = [torch.empty_like(w) for _ in range(count)]
        plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=outs)
        plan.adam_step_([_ADAM], predict=chosen)
        for j, out in enumerate(outs):
            terms = chosen[j].adam(_ADAM)
            expected = predict_adam(terms, w, m, u, eps=_ADAM.eps)
            ref.assert_same(out, expected, f"outs[{j}], {chosen[j]}")

    @pytest.mark.parametrize("lengths", [[64], [63, 1, 1], [40, 40], [1, 64, 64], [30, 30, 30, 5]])
    def test_more_terms_than_one_launch_holds(self, lengths: list[int]) -> None:
        w, g, m = (torch.randn(300, dtype=torch.float64) for _ in range(3))
        u = torch.rand(300, dtype=torch.float64)
        outs = [torch.empty_like(w) for _ in lengths]
        plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=outs)
        plan.adam_step_([_ADAM], predict=[Geometric(n) for n in lengths])
        for j, n in enumerate(lengths):
            expected = predict_adam(Geometric(n).adam(_ADAM), w, m, u, eps=_ADAM.eps)
            ref.assert_same(outs[j], expected, f"outs[{j}], {n} terms")

    def test_passes_that_are_not_needed_are_not_made(self) -> None:
        w, g, m, u = (torch.rand(300) for _ in range(4))
        outs = [torch.empty(300) for _ in range(9)]
        plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=outs)
        plan.adam_step_([_ADAM], predict=[1.0] * 8)
        assert plan._native.last_launch() == (1, 1)
        plan.adam_step_([_ADAM], predict=[1.0] * 9)
        assert plan._native.last_launch() == (2, 2)
        plan.adam_step_([_ADAM], predict=[Geometric(32), Geometric(32)])
        assert plan._native.last_launch() == (1, 1)
        plan.adam_step_([_ADAM], predict=[Geometric(32), Geometric(33)])
        assert plan._native.last_launch() == (2, 2)
        plan.sgd_step_([_SGD], predict=[Geometric(50)] * 8)
        assert plan._native.last_launch() == (1, 1)

    @pytest.mark.parametrize("rule", ["sgd", "adam"])
    def test_second_order_beyond_what_one_pass_writes(self, rule: str) -> None:
        """The gradient is gone by the second pass: those that need it go first, wherever they are.

        More of them than one pass writes are an error, and no step is made.
        """
        start = [torch.rand(30) for _ in range(4)]

        def step(predict: list[Any]) -> list[Tensor]:
            w, g, v, u = mine = [t.clone() for t in start]
            outs = [torch.zeros(30) for _ in predict]
            plan = st.Plan(w, exp_avgs=v, exp_avg_sqs=u, grads=g, outs=outs)
            if predict == [second] * 9:
                call = plan.sgd_step_ if rule == "sgd" else plan.adam_step_
                options: dict[str, Any] = {"predict": predict}
                numbers: Any = [_SGD] if rule == "sgd" else [_ADAM]
                raises(ValueError, "second-order", lambda: call(numbers, **options), (mine, outs))
            elif rule == "sgd":
                plan.sgd_step_([_SGD], predict=predict)
            else:
                plan.adam_step_([_ADAM], predict=predict)
            return outs

        second = SecondOrder(2.0, 1.0)
        first = step([second] + [1.0] * 9)
        for at in (1, 7, 8, 9):
            outs = step([1.0] * at + [second] + [1.0] * (9 - at))
            ref.assert_bits(outs[at], first[0], f"at {at}")
            ref.assert_lists(outs[:at] + outs[at + 1 :], first[1:], f"around {at}")
        step([second] * 9)

    def test_second_order_into_several_types_is_refused(self) -> None:
        w, g, v = (torch.rand(30) for _ in range(3))
        outs = [torch.zeros(30), torch.zeros(30, dtype=torch.bfloat16)]
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=outs)
        law = SecondOrder(2.0)
        raises(
            ValueError,
            "second-order",
            lambda: plan.sgd_step_([_SGD], predict=[law, law]),
            (w, v, outs),
        )

    @given(case=cases(min_size=1, single=False), lead=hs.floats(0, 4), delay=hs.integers(0, 5))
    def test_second_order_to_the_bit(self, case: Case, lead: float, delay: int) -> None:
        """From the unrounded direction and the stored weights and moments."""
        law = SecondOrder(delay, lead)
        hyper = ref.SGD(lr=0.1, momentum=0.9, weight_decay=0.1, smoothed=True)
        w, g, v, out = (case.stream(i, momentum=i == 2) for i in range(4))
        d = [hyper.direction(*row) for row in zip(tensors(w), tensors(g), strict=True)]
        st.sgd_step_(
            tensors(w), tensors(g), tensors(v), predict=[(law, tensors(out))], **hyper.keywords()
        )
        terms = law.sgd(Sgd(**hyper.keywords()))
        for i, row in enumerate(zip(tensors(w), tensors(v), strict=True)):
            ref.assert_same(tensors(out)[i], predict_sgd(terms, *row, d=d[i]), f"sgd, {i}")
        numbers = Adam(0.1, (0.9, 0.99), 1e-8, 0.1, 3, maximize=True)
        w, g, m, u, out = (case.stream(i, momentum=i in (2, 3)) for i in range(5))
        for t in tensors(u):
            t.abs_()
        d = [
            ref.direction(a, b, maximize=True, l2=0.1)
            for a, b in zip(tensors(w), tensors(g), strict=True)
        ]
        plan = st.Plan(
            tensors(w), exp_avgs=tensors(m), exp_avg_sqs=tensors(u), grads=tensors(g),
            outs=[tensors(out)],
        )  # fmt: skip
        plan.adam_step_([numbers], predict=[law])
        for i, moments in enumerate(zip(*map(tensors, (w, m, u)), strict=True)):
            hat = predict_adam(law.adam(numbers), *moments, eps=1e-8, d=d[i])
            ref.assert_same(tensors(out)[i], hat, f"adam, {i}")


class TestMissingGradients:
    """With outs of every law, a tensor without a gradient gets its weights there."""

    @pytest.mark.parametrize(
        "law",
        [Linear(2.0), Geometric(3), SecondOrder(2.0, 1.0)],
        ids=str,
    )
    @pytest.mark.parametrize("rule", ["sgd", "adam"])
    def test_every_law(self, rule: str, law: Law) -> None:
        lists = [[torch.rand(7) for _ in range(4)] for _ in range(3)]
        w, v, u = lists
        g: list[Tensor | None] = [torch.rand(7), None, None, torch.rand(7)]
        before = [[t.clone() for t in x] for x in lists]
        outs = [[torch.full((7,), math.nan) for _ in range(4)] for _ in range(2)]
        plan = st.Plan(w, exp_avgs=v, exp_avg_sqs=u, grads=g, outs=outs)
        if rule == "sgd":
            plan.sgd_step_([_SGD], predict=[law, law])
        else:
            plan.adam_step_([_ADAM], predict=[law, law])
        for i in (1, 2):
            for k, x in enumerate(lists):
                ref.assert_bits(x[i], before[k][i], f"list {k}, tensor {i}")
            for out in outs:
                ref.assert_bits(out[i], before[0][i], f"outs, tensor {i}")
        for i in (0, 3):
            assert not torch.equal(w[i], before[0][i]) and not bool(outs[0][i].isnan().any())
            ref.assert_bits(outs[0][i], outs[1][i], f"outs, tensor {i}")

    def test_beyond_eight_outputs(self) -> None:
        w, v = [torch.rand(7), torch.rand(7)], [torch.rand(7), torch.rand(7)]
        outs = [[torch.full((7,), math.nan) for _ in range(2)] for _ in range(11)]
        plan = st.Plan(w, momentum_buffers=v, grads=[None, torch.rand(7)], outs=outs)
        plan.sgd_step_([_SGD], predict=[float(j) for j in range(11)])
        for j, out in enumerate(outs):
            ref.assert_bits(out[0], w[0], f"outs[{j}][0]")
            hat = st.predict(w[1], v[1], lr=0.1, steps=float(j))
            ref.assert_bits(out[1], hat, f"outs[{j}][1]")

    def test_all_of_them(self) -> None:
        w, m, u, out = (torch.rand(7) for _ in range(4))
        before = w.clone()
        plan = st.Plan([w], exp_avgs=[m], exp_avg_sqs=[u], grads=[None], outs=[[out]])
        plan.adam_step_([_ADAM], predict=[Geometric(3)])
        ref.assert_bits(w, before, "params")
        ref.assert_bits(out, before, "out")


def test_an_empty_plan() -> None:
    plan = st.Plan([], exp_avgs=[], exp_avg_sqs=[], grads=[], stashed=[], outs=[[]])
    plan.adam_step_([_ADAM], predict=[Geometric(3)])
    plan.sgd_step_([_SGD], predict=[SecondOrder(2.0)])
    plan.predict([_ADAM], steps=2.0)
    plan.predict_([_SGD], steps=2.0)
    plan.stash_predict_([_ADAM], steps=Geometric(3))
    plan.extrapolate(steps=2.0)
    plan.write_out()


class TestRefuses:
    """Errors of a plan."""

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda p: p.adam_step_([_ADAM]), "exp_avgs"),
            (lambda p: p.sgd_step_([_SGD]), "momentum_buffers"),
            (lambda p: p.predict_([_ADAM], steps=1.0), "exp_avgs"),
            (lambda p: p.predict_([_SGD], steps=1.0), "momentum_buffers"),
            (lambda p: p.stash_predict_([_SGD], steps=1.0), "stashed|momentum_buffers"),
            (lambda p: p.extrapolate(steps=1.0), "previous|stashed|out"),
            (lambda p: p.write_out(), "^out"),
            (lambda p: p.write_out(out=3), "^out"),
        ],
    )
    def test_a_list_that_is_missing(self, call: Any, name: str) -> None:
        w = torch.randn(4)
        plan = st.Plan(w, grads=torch.ones(4))
        raises(ValueError, name, lambda: call(plan), w)

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda p: p.predict(lr=0.1, steps=1.0), "out"),
            (lambda p: p.write_out(), "out"),
            (lambda p: p.extrapolate(steps=1.0), "out"),
            (lambda p: p.sgd_step_(lr=0.1, momentum=0.9, predict=[1.0]), "predict"),
        ],
    )
    def test_a_plan_without_outs_says_what_it_needs(self, call: Any, name: str) -> None:
        w = torch.randn(4)
        plan = st.Plan(w, momentum_buffers=w + 1, grads=torch.ones(4), stashed=torch.zeros(4))
        said = rf"^{name}: the plan has no outs to write .*Plan\(..., outs=\[...\]\)"
        raises(ValueError, said, lambda: call(plan), w)

    def test_second_moments_that_are_missing(self) -> None:
        w, m = torch.randn(4), torch.randn(4)
        plan = st.Plan(w, exp_avgs=m, grads=torch.ones(4), stashed=torch.zeros(4))
        for call in (
            lambda: plan.adam_step_([_ADAM]),
            lambda: plan.predict_([_ADAM], steps=1.0),
            lambda: plan.stash_predict_([_ADAM], steps=1.0),
        ):
            raises(ValueError, "exp_avg_sqs", call, (w, m))

    def test_gradients_that_are_missing(self) -> None:
        lists = [torch.randn(4) for _ in range(3)]
        plan = st.Plan(lists[0], exp_avgs=lists[1], exp_avg_sqs=lists[2])
        raises(ValueError, "grads", lambda: plan.adam_step_([_ADAM]), lists)

    def test_momentum_buffers_and_first_moments_exclude_each_other(self) -> None:
        w = torch.randn(4)
        raises(
            ValueError,
            "exp_avgs|momentum_buffers",
            lambda: st.Plan(w, momentum_buffers=w.clone(), exp_avgs=w.clone()),
            w,
        )

    def test_predictions_for_more_outs_than_there_are(self) -> None:
        lists = [torch.rand(4) for _ in range(4)]
        w, g, m, u = lists
        plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=[torch.zeros(4)])
        raises(ValueError, "predict", lambda: plan.adam_step_([_ADAM], predict=[1.0, None]), lists)

    @pytest.mark.parametrize("out", [1, -1, 1.5, "0", [0]], ids=repr)
    def test_an_out_that_does_not_exist(self, out: Any) -> None:
        w, v, o = torch.rand(4), torch.rand(4), torch.zeros(4)
        plan = st.Plan(w, momentum_buffers=v, stashed=v.clone(), outs=[o])
        for call in (
            lambda: plan.predict(lr=0.1, steps=1.0, out=out),
            lambda: plan.predict([_SGD], steps=1.0, out=out),
            lambda: plan.extrapolate(steps=1.0, out=out),
            lambda: plan.write_out(out=out),
        ):
            raises((ValueError, TypeError, IndexError), "^out", call, (w, v, o))

    def test_a_prediction_without_momentum(self) -> None:
        lists = [torch.rand(4) for _ in range(4)]
        w, g, v, out = lists
        plan = st.Plan(w, momentum_buffers=v, grads=g, stashed=v.clone(), outs=[out])
        none = [Sgd(0.1, 0.0)]
        raises(ValueError, "momentum", lambda: plan.sgd_step_(none, predict=[1.0]), lists)
        raises(ValueError, "momentum", lambda: plan.predict(none, steps=1.0), lists)
        raises(ValueError, "momentum", lambda: plan.stash_predict_(none, steps=1.0), lists)
