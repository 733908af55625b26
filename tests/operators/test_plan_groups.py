"""Tests plans with parameter groups: separate numbers for every group in one launch."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as hs
import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.bad_input import raises
from helpers.ops_rules import predict_adam, predict_sgd
from helpers.ops_tensors import Case, cases, check_guards, tensors
from hypothesis import given
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.laws import Geometric, Law, Linear, SecondOrder
from spectrain_ext.operators.numbers import Adam, Sgd

_SGD = [
    ref.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    ref.SGD(lr=0.01, momentum=0.5, nesterov=True, maximize=True),
    ref.SGD(lr=0.5, momentum=0.99, smoothed=True, weight_decay=0.1, decoupled_weight_decay=True),
    ref.SGD(lr=0.0, momentum=0.9, dampening=0.3),
]


def _groups(draw: Any, n: int, n_groups: int) -> list[int]:
    """Assign a group to every tensor; the last one makes all groups exist."""
    groups = draw(hs.lists(hs.integers(0, n_groups - 1), min_size=n, max_size=n))
    if n:
        groups[draw(hs.integers(0, n - 1))] = n_groups - 1
    return groups


@given(case=cases(min_size=1, single=False), data=hs.data(), n_groups=hs.integers(1, 4))
def test_sgd(case: Case, data: hs.DataObject, n_groups: int) -> None:
    """Every tensor gets the result of its group's numbers, independent of other tensors."""
    groups = data.draw(hs.composite(lambda d: _groups(d, len(case.rows), n_groups))())
    w, g, v, out, out2 = (case.stream(i, momentum=i == 2) for i in range(5))
    hyper = _SGD[:n_groups]
    numbers = [Sgd(**h.keywords()) for h in hyper]
    expected = [
        hyper[group].step(*row)
        for group, row in zip(groups, zip(*map(tensors, (w, g, v)), strict=True), strict=True)
    ]
    plan = st.Plan(
        tensors(w), momentum_buffers=tensors(v), grads=tensors(g),
        outs=[tensors(out), tensors(out2)], groups=groups,
    )  # fmt: skip
    laws: list[Law] = [Linear(2.0), Geometric(3)]
    plan.sgd_step_(numbers, predict=laws)
    ref.assert_lists(tensors(w), [a for a, _ in expected], "params")
    ref.assert_lists(tensors(v), [b for _, b in expected if b is not None], "momentum_buffers")
    for law, stream in zip(laws, (out, out2), strict=True):
        for i, group in enumerate(groups):
            hat = predict_sgd(law.sgd(numbers[group]), tensors(w)[i], tensors(v)[i])
            ref.assert_same(tensors(stream)[i], hat, f"{law}, tensor {i} of group {group}")
    before = [ref.clone(t) for t in tensors(out)]
    plan.predict(numbers, steps=laws[0], out=1)
    ref.assert_lists(tensors(out2), before, "predict of groups")
    plan.predict_(numbers, steps=laws[0])
    ref.assert_lists(tensors(w), before, "predict of groups in place")
    check_guards(w=w, g=g, v=v, out=out, out2=out2)


@given(case=cases(min_size=1, single=False), data=hs.data(), n_groups=hs.integers(1, 4))
def test_adam(case: Case, data: hs.DataObject, n_groups: int) -> None:
    """Adam, AdamW and NAdam together, with different step counts."""
    groups = data.draw(hs.composite(lambda d: _groups(d, len(case.rows), n_groups))())
    w, g, m, u, out = (case.stream(i, momentum=i in (2, 3)) for i in range(5))
    for t in tensors(u):
        t.abs_()
    numbers = [
        Adam(0.1, (0.9, 0.999), 1e-8, 0.0, 1),
        Adam(0.01, (0.5, 0.99), 1e-3, 0.1, 7, decoupled_weight_decay=True),
        Adam(0.05, (0.9, 0.9), 1e-8, 0.1, 20, maximize=True),
        Adam(0.1, (0.9, 0.999), 1e-8, 0.0, 3, momentum_decay=4e-3, mu_product=0.1),
    ][:n_groups]
    alone = [[ref.clone(t) for t in tensors(s)] for s in (w, g, m, u, out)]
    plan = st.Plan(
        tensors(w), exp_avgs=tensors(m), exp_avg_sqs=tensors(u), grads=tensors(g),
        outs=[tensors(out)], groups=groups,
    )  # fmt: skip
    law = Geometric(3)
    plan.adam_step_(numbers, predict=[law])
    for i, group in enumerate(groups):
        a, b, c, d, e = (x[i] for x in alone)
        one = st.Plan(a, exp_avgs=c, exp_avg_sqs=d, grads=b, outs=[e])
        one.adam_step_([numbers[group]], predict=[law])
        for name, mine, his in (("w", w, a), ("m", m, c), ("u", u, d), ("out", out, e)):
            ref.assert_same(tensors(mine)[i], his, f"{name}[{i}] of group {group}")
        terms = law.adam(numbers[group])
        ref.assert_same(e, predict_adam(terms, a, c, d, eps=numbers[group].eps), f"out[{i}]")
    before = [ref.clone(t) for t in tensors(out)]
    plan.predict_(numbers, steps=law)
    ref.assert_lists(tensors(w), before, "predict of groups in place")
    check_guards(w=w, g=g, m=m, u=u, out=out)


class TestLaunches:
    """Groups need no additional launches."""

    @pytest.mark.parametrize("n_groups", [1, 2, 40])
    def test_any_number_of_groups_is_one_launch(self, n_groups: int) -> None:
        lists = [[torch.rand(5) for _ in range(300)] for _ in range(5)]
        w, g, m, u, out = lists
        groups = [i % n_groups for i in range(300)]
        plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=[out], groups=groups)
        adams = [Adam(0.1 / (k + 1), (0.9, 0.99), 1e-8, 0.0, 1) for k in range(n_groups)]
        plan.adam_step_(adams, predict=[3.0])
        assert plan._native.last_launch() == (1, 300)
        sgds = [Sgd(0.1 / (k + 1), 0.9) for k in range(n_groups)]
        plan.sgd_step_(sgds, predict=[3.0])
        assert plan._native.last_launch() == (1, 300)
        plan.predict(sgds, steps=2.0)
        assert plan._native.last_launch() == (1, 300)
        plan.predict(adams, steps=Geometric(5))
        assert plan._native.last_launch() == (1, 300)

    def test_neighbours_of_one_group_merge_and_others_do_not(self) -> None:
        flat = [list(torch.rand(60).split(10)) for _ in range(3)]
        w, g, v = flat
        plan = st.Plan(w, momentum_buffers=v, grads=g, groups=[0, 0, 1, 1, 1, 0])
        plan.sgd_step_([Sgd(0.1, 0.9), Sgd(0.2, 0.9)])
        assert plan._native.last_launch() == (1, 3)
        plan.predict_([Sgd(0.1, 0.9)] * 2, steps=1.0)
        assert plan._native.last_launch() == (1, 3)


def test_groups_without_momentum() -> None:
    w, g = [torch.zeros(3), torch.zeros(3)], [torch.ones(3), torch.ones(3)]
    plan = st.Plan(w, grads=g, groups=[1, 0])
    plan.sgd_step_([Sgd(1.0, 0.0), Sgd(0.5, 0.0)])
    assert w[0].tolist() == [-0.5] * 3 and w[1].tolist() == [-1.0] * 3


def test_first_step_and_missing_gradients_go_by_tensor_not_by_group() -> None:
    w, v = [torch.zeros(3) for _ in range(4)], [torch.full((3,), 8.0) for _ in range(4)]
    g: list[Tensor | None] = [torch.ones(3), torch.ones(3), None, torch.ones(3)]
    out = [torch.zeros(3) for _ in range(4)]
    plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out], groups=[0, 1, 1, 0])
    plan.sgd_step_(
        [Sgd(1.0, 0.5), Sgd(0.5, 0.25)], first_step=[True, False, True, False], predict=[1.0]
    )
    assert [float(t[0]) for t in w] == [-1.0, -1.5, 0.0, -5.0]
    assert [float(t[0]) for t in v] == [1.0, 3.0, 8.0, 5.0]
    assert [float(t[0]) for t in out] == [-2.0, -3.0, 0.0, -10.0]


def test_the_methods_of_one_group_apply_to_all() -> None:
    w, v = [torch.zeros(3), torch.zeros(3)], [torch.ones(3), torch.ones(3)]
    plan = st.Plan(w, momentum_buffers=v, grads=[torch.ones(3)] * 2, groups=[0, 1])
    plan.predict_(lr=1.0, steps=2.0)
    assert [t.tolist() for t in w] == [[-2.0] * 3] * 2
    plan.sgd_step_(lr=1.0, momentum=1.0)
    assert [t.tolist() for t in w] == [[-4.0] * 3] * 2


def test_every_group_may_have_a_law_of_its_own() -> None:
    """The bits equal those of one plan per group, with and without a step."""
    w, v, g = ([torch.rand(5) for _ in range(3)] for _ in range(3))
    outs = [[torch.zeros(5) for _ in range(3)] for _ in range(2)]
    numbers = [Sgd(0.1, 0.9), Sgd(0.5, 0.5, weight_decay=0.1), Sgd(0.2, 0.9, nesterov=True)]
    laws = (2.0, Geometric(3), 0)
    alone = [
        ([a.clone(), b.clone(), c.clone()], torch.zeros(5)) for a, b, c in zip(w, v, g, strict=True)
    ]
    plan = st.Plan(w, momentum_buffers=v, grads=g, outs=outs, groups=[0, 1, 2])
    plan.sgd_step_(numbers, predict=[laws])
    plan.predict(numbers, steps=laws, out=1)
    ref.assert_lists(outs[0], outs[1], "a prediction without a step")
    for i, ((a, b, c), out) in enumerate(alone):
        one = st.Plan(a, momentum_buffers=b, grads=c, outs=[out])
        one.sgd_step_([numbers[i]], predict=[laws[i]])
        ref.assert_bits(outs[0][i], out, f"group {i}")
    ref.assert_bits(outs[0][2], w[2], "a horizon of 0")


def test_numbers_for_all_groups_are_keywords() -> None:
    """Every number of SGD, in steps and in predictions."""
    sgd: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "smoothed": True}
    lists = [[torch.rand(3), torch.rand(3)] for _ in range(4)]
    results = []
    for same in (True, False):
        w, g, v, out = ([t.clone() for t in tensors] for tensors in lists)
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out], groups=[0, 1])
        if same:
            plan.sgd_step_(**sgd)
            plan.predict(steps=Geometric(3), **sgd)
        else:
            plan.sgd_step_([Sgd(**sgd)] * 2)
            plan.predict([Sgd(**sgd)] * 2, steps=Geometric(3))
        results.append([*w, *v, *out])
    ref.assert_lists(*results, "keywords")


def test_a_group_without_tensors_has_numbers_all_the_same() -> None:
    w = [torch.zeros(3), torch.zeros(3)]
    plan = st.Plan(w, grads=[torch.ones(3)] * 2, groups=[0, 2])
    plan.sgd_step_([Sgd(1.0, 0.0), Sgd(7.0, 0.0), Sgd(3.0, 0.0)])
    assert [t.tolist() for t in w] == [[-1.0] * 3, [-3.0] * 3]


class TestRefuses:
    """Bad groups and bad lists of numbers."""

    @pytest.mark.parametrize(
        ("groups", "error", "names"),
        [
            ([0], ValueError, "groups"),
            ([0, 0, 0], ValueError, "groups"),
            ([], ValueError, "groups"),
            ([0, -1], ValueError, r"groups\[1\]"),
            ([0, 70_000], ValueError, r"groups\[1\]"),
            ([0, 1.5], TypeError, r"groups\[1\]"),
            ([0, None], TypeError, r"groups\[1\]"),
            ([0, "1"], TypeError, r"groups\[1\]"),
            ("01", TypeError, r"groups"),
            (3, TypeError, r"groups"),
        ],
        ids=str,
    )
    def test_groups(self, groups: Any, error: type[Exception], names: str) -> None:
        w = [torch.zeros(3), torch.zeros(3)]
        raises(error, "^" + names, lambda: st.Plan(w, groups=groups), w)

    def test_numpy_integers_and_tuples_are_groups(self) -> None:
        w = [torch.zeros(3), torch.zeros(3)]
        for groups in ((0, 1), np.array([0, 1]), range(2)):
            plan = st.Plan(w, grads=[torch.ones(3)] * 2, groups=groups)  # type: ignore[arg-type]
            assert plan._native.n_groups == 2

    @staticmethod
    def _plan() -> tuple[st.Plan, list[list[Tensor]]]:
        lists = [[torch.rand(3), torch.rand(3)] for _ in range(6)]
        w, g, m, u, kept, out = lists
        plan = st.Plan(
            w, exp_avgs=m, exp_avg_sqs=u, grads=g, stashed=kept, outs=[out], groups=[0, 1]
        )
        return plan, lists

    _S, _A = Sgd(0.1, 0.9), Adam(0.1, (0.9, 0.99), 1e-8, 0.0, 1)

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_numbers_for_another_count_of_groups(self, count: int) -> None:
        plan, lists = self._plan()
        for call in (
            lambda: plan.sgd_step_([self._S] * count),
            lambda: plan.adam_step_([self._A] * count),
            lambda: plan.predict_([self._S] * count, steps=1.0),
            lambda: plan.predict([self._A] * count, steps=1.0),
            lambda: plan.stash_predict_([self._A] * count, steps=1.0),
        ):
            raises(ValueError, "groups", call, lists, "2", str(count))

    @pytest.mark.parametrize("name", ["sgd_step_", "adam_step_", "predict", "stash_predict"])
    def test_numbers_of_another_rule(self, name: str) -> None:
        plan, lists = self._plan()
        s: Any = self._S
        a: Any = self._A
        calls = {
            "sgd_step_": lambda: plan.sgd_step_([s, a]),
            "adam_step_": lambda: plan.adam_step_([a, s]),
            "predict": lambda: plan.predict([a, s], steps=1.0),
            "stash_predict": lambda: plan.stash_predict_([s, a], steps=1.0),
        }
        raises(TypeError, r"groups\[1\]", calls[name], lists)

    @pytest.mark.parametrize("bad", [Sgd(0.1, 0.9), None, 3, "sgd", [3, 4]], ids=repr)
    def test_what_is_no_list_of_numbers(self, bad: Any) -> None:
        plan, lists = self._plan()
        raises(TypeError, "lr" if bad is None else "groups", lambda: plan.sgd_step_(bad), lists)
        raises(TypeError, "groups", lambda: plan.adam_step_(bad), lists)
        raises(TypeError, "groups", lambda: plan.predict_(bad, steps=1.0), lists)

    @pytest.mark.parametrize("name", ["sgd_step_", "predict", "stash_predict_"])
    @pytest.mark.parametrize("number", ["lr", "weight_decay", "nesterov"])
    def test_numbers_of_groups_and_for_all(self, name: str, number: str) -> None:
        plan, lists = self._plan()
        given: Any = {number: 0.1, **({} if name == "sgd_step_" else {"steps": 1.0})}
        call = getattr(plan, name)
        why = f"^{number}: groups are given"
        raises(TypeError, why, lambda: call([self._S] * 2, **given), lists)

    def test_no_numbers_at_all(self) -> None:
        plan, lists = self._plan()
        raises(TypeError, "^lr: ", plan.sgd_step_, lists)
        raises(TypeError, "^momentum: ", lambda: plan.sgd_step_(lr=0.1), lists)
        raises(TypeError, "groups", lambda: plan.predict(steps=1.0), lists)

    @pytest.mark.parametrize("step", ["sgd", "adam"])
    def test_an_unknown_option(self, step: str) -> None:
        plan, lists = self._plan()
        call: Any = plan.adam_step_ if step == "adam" else plan.sgd_step_
        numbers: Any = [self._A if step == "adam" else self._S] * 2
        raises(
            TypeError, "unexpected keyword argument 'clip'", lambda: call(numbers, clip=1), lists
        )

    @pytest.mark.parametrize("laws", [(), (1.0,), (1.0, 2.0, 3.0)], ids=str)
    def test_laws_for_another_count_of_groups(self, laws: Any) -> None:
        plan, lists = self._plan()
        names = f"expected one for each of 2 groups, got {len(laws)}"
        step = lambda: plan.sgd_step_([self._S] * 2, predict=[laws])  # noqa: E731
        raises(ValueError, rf"predict\[0\]: {names}", step, lists)
        raises(ValueError, names, lambda: plan.predict(lr=0.1, steps=laws), lists)
        bad: Any = (1.0, "x")
        raises(TypeError, r"steps\[1\]", lambda: plan.predict(lr=0.1, steps=bad), lists)

    def test_groups_with_and_without_momentum_exclude_each_other(self) -> None:
        plan, lists = self._plan()
        mixed = [Sgd(0.1, 0.9), Sgd(0.1, 0.0)]
        raises(ValueError, "momentum", lambda: plan.sgd_step_(mixed), lists)
        raises(ValueError, "momentum", lambda: plan.predict_(mixed, steps=1.0), lists)

    def test_a_law_that_one_group_cannot_have(self) -> None:
        plan, lists = self._plan()
        decayed = [Sgd(0.1, 0.9), Sgd(0.1, 0.9, weight_decay=0.1)]
        law = Geometric(1.5)
        raises(ValueError, "steps", lambda: plan.predict(decayed, steps=law), lists)
        raises(ValueError, "steps", lambda: plan.sgd_step_(decayed, predict=[law]), lists)
        raises(ValueError, "gradient", lambda: plan.predict_(decayed, steps=SecondOrder(1)), lists)
