"""Tests adam_step_ and adam_predict for Adam, AdamW and NAdam: exact bits, and torch.optim."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as hs
import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.ops_rules import Adam, predict_adam
from helpers.ops_tensors import (
    DTYPES,
    Case,
    Guarded,
    as_list,
    cases,
    check_guards,
    contiguous,
    horizons,
    rates,
    tensors,
    values,
)
from hypothesis import given
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws
from spectrain_ext.operators import numbers


@hs.composite
def hypers(draw: hs.DrawFn) -> Adam:
    """Adam, AdamW and NAdam at any step, with ordinary and extreme numbers."""
    hyper = Adam(
        lr=draw(rates()),
        step=1,
        betas=(
            draw(hs.sampled_from([0.9, 0.0, 0.5, 0.95])),
            draw(hs.sampled_from([0.999, 0.0, 0.95])),
        ),
        eps=draw(hs.sampled_from([1e-8, 0.0, 1e-30, 1.0])),
        weight_decay=draw(hs.sampled_from([0.0, 0.01, 2.0])),
        decoupled_weight_decay=draw(hs.booleans()),
        maximize=draw(hs.booleans()),
        momentum_decay=draw(hs.sampled_from([None, 4e-3, 0.0])),
    )
    return hyper.at(draw(hs.sampled_from([1, 2, 7, 100, 3000])))


def keywords(hyper: Adam) -> dict[str, Any]:
    """Return the arguments of adam_step_: only NAdam has the product of all mu."""
    given_ = hyper.keywords()
    if hyper.momentum_decay is None:
        given_.pop("mu_product")
    return given_


def checked(hyper: Adam) -> numbers.Adam:
    """Return the same numbers as a Plan takes them."""
    return numbers.Adam(**keywords(hyper))


def second_moments(case: Case, index: int, negative: bool) -> list[Guarded]:
    """Return a stream of second moments; not negative unless requested."""
    stream = case.stream(index, momentum=True)
    if not negative:
        for g in stream:
            g.flat.copy_(g.flat.abs())
    return stream


@given(case=cases(), hyper=hypers(), data=hs.data())
def test_one_step(case: Case, hyper: Adam, data: hs.DataObject) -> None:
    n = len(case.rows)
    w, g, m = case.stream(0), case.stream(1), case.stream(2, momentum=True)
    u = second_moments(case, 3, data.draw(hs.booleans(), label="negative"))
    missing = data.draw(hs.lists(hs.booleans(), min_size=n, max_size=n), label="missing")
    horizon = data.draw(hs.lists(horizons(), max_size=3), label="horizons")
    outs = [case.stream(4 + j) for j in range(len(horizon))]
    grads = [None if gone else t for gone, t in zip(missing, tensors(g), strict=True)]
    expected = [
        hyper.updated(*row) for row in zip(tensors(w), grads, tensors(m), tensors(u), strict=True)
    ]
    old_g = [ref.clone(t) for t in tensors(g)]
    st.adam_step_(
        case.given(w),
        grads[0] if case.single else grads,
        case.given(m),
        case.given(u),
        predict=[(s, case.given(out)) for s, out in zip(horizon, outs, strict=True)],
        **keywords(hyper),
    )
    for k, (name, stream) in enumerate((("params", w), ("exp_avgs", m), ("exp_avg_sqs", u))):
        ref.assert_lists(tensors(stream), [e[k] for e in expected], name)
    ref.assert_lists(tensors(g), old_g, "grads", exact=True)
    for j, (s, out) in enumerate(zip(horizon, outs, strict=True)):
        terms = laws.Linear(s).adam(checked(hyper))
        for i, row in enumerate(zip(tensors(w), tensors(m), tensors(u), strict=True)):
            label = f"predict[{j}][{i}], steps {s}"
            if missing[i]:
                ref.assert_bits(out[i].tensor, row[0], label)
            else:
                ref.assert_same(out[i].tensor, predict_adam(terms, *row, eps=hyper.eps), label)
        check_guards(out=out)
    check_guards(params=w, grads=g, exp_avgs=m, exp_avg_sqs=u)


@given(case=cases(), hyper=hypers(), steps=hs.one_of(horizons(), hs.integers(0, 70)))
def test_a_prediction_alone(case: Case, hyper: Adam, steps: float) -> None:
    """Linear, and the loop for a whole number of steps; only the output is written."""
    hyper = replace(hyper, momentum_decay=None)
    w, m = case.stream(0), case.stream(1, momentum=True)
    u, out = second_moments(case, 2, False), case.stream(3)
    law: laws.Law = laws.Linear(steps)
    if isinstance(steps, int) and steps <= 64:
        law = laws.Geometric(steps)
    before = [ref.clone(t) for t in tensors(w) + tensors(m) + tensors(u)]
    terms = law.adam(checked(hyper))
    expected = [
        predict_adam(terms, *row, eps=hyper.eps)
        for row in zip(tensors(w), tensors(m), tensors(u), strict=True)
    ]
    options = keywords(hyper)
    del options["maximize"], options["momentum_decay"]
    given_out = case.given(out)
    result = st.adam_predict(
        case.given(w), case.given(m), case.given(u), steps=law, out=given_out, **options
    )
    assert result is given_out or all(
        a is b.tensor for a, b in zip(as_list(result), out, strict=True)
    )
    ref.assert_lists(tensors(out), expected, "out", exact=steps == 0)
    ref.assert_lists(tensors(w) + tensors(m) + tensors(u), before, "inputs", exact=True)
    fresh = st.adam_predict(case.given(w), case.given(m), case.given(u), steps=law, **options)
    assert isinstance(fresh, Tensor) == case.single
    ref.assert_lists(as_list(fresh), expected, "result", exact=steps == 0)
    check_guards(params=w, exp_avgs=m, exp_avg_sqs=u, out=out)


@given(case=cases(single=False), hyper=hypers(), s=hs.integers(1, 20), data=hs.data())
def test_the_step_writes_what_a_later_prediction_gives(
    case: Case, hyper: Adam, s: int, data: hs.DataObject
) -> None:
    """Laws of one and many terms, in the same pass and alone, including NAdam's."""
    w, g, m = tensors(case.stream(0)), tensors(case.stream(1)), case.stream(2, momentum=True)
    u = tensors(second_moments(case, 3, False))
    some: list[laws.Law] = [
        laws.Linear(s + 0.5),
        laws.Geometric(s),
        laws.SecondOrder(0.0, s) if hyper.betas[0] else laws.Linear(s),
        laws.Geometric(0),
    ]
    chosen = data.draw(hs.lists(hs.sampled_from(some), min_size=1, max_size=3), label="laws")
    outs = [tensors(case.stream(4 + j)) for j in range(2 * len(chosen))]
    plan = st.Plan(w, exp_avgs=tensors(m), exp_avg_sqs=u, grads=g, outs=outs)
    plan.adam_step_([checked(hyper)], predict=chosen)
    for j, law in enumerate(chosen):
        plan.predict([checked(hyper)], steps=law, out=len(chosen) + j)
        ref.assert_lists(outs[j], outs[len(chosen) + j], f"outs[{j}], {law}")
    plan.predict_([checked(hyper)], steps=chosen[0])
    ref.assert_lists(w, outs[0], "in place")


@given(case=cases(min_size=1, single=False), hyper=hypers())
def test_a_plan_takes_the_numbers_as_keywords(case: Case, hyper: Adam) -> None:
    found: list[list[Any]] = []
    numbers = checked(hyper)
    for by_keyword in (False, True):
        w, g, m = tensors(case.stream(0)), tensors(case.stream(1)), case.stream(2, momentum=True)
        u, out = tensors(second_moments(case, 3, False)), tensors(case.stream(4))
        moments = tensors(m)
        plan = st.Plan(w, exp_avgs=moments, exp_avg_sqs=u, grads=g, outs=[out])
        if by_keyword:
            names = set(numbers.__slots__) - {"correction"}
            each: Any = {name: getattr(numbers, name) for name in names}
            plan.adam_step_(**each, predict=[2.0], zero_grad=True)
        else:
            plan.adam_step_([numbers], predict=[2.0], zero_grad=True)
        found.append([*w, *g, *moments, *u, *out])
    ref.assert_lists(*found, "keywords")


def test_numbers_of_a_plans_step_of_adam_that_are_missing_or_given_twice() -> None:
    w, m, u = (torch.ones(3) for _ in range(3))
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=torch.ones(3))
    for own, match in (
        ({}, "lr: adam_step_ needs it, or groups"),
        ({"lr": 0.1}, "step: adam_step_ needs it, or groups"),
        ({"groups": [checked(Adam(0.1, step=1))], "eps": 1e-3}, "eps: groups are given"),
        ({"lr": 0.1, "step": 1, "momentum": 0.9}, "unexpected keyword argument 'momentum'"),
    ):
        with pytest.raises(TypeError, match=match):
            plan.adam_step_(**own)  # type: ignore[arg-type]
    assert torch.equal(w, torch.ones(3))


_OPTIMIZERS: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = [
    ("Adam", torch.optim.Adam, {}, {}),
    ("Adam with L2", torch.optim.Adam, {"weight_decay": 0.05}, {}),
    ("Adam maximize", torch.optim.Adam, {"maximize": True, "weight_decay": 0.05}, {}),
    ("Adam betas", torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}, {}),
    ("Adam no momentum", torch.optim.Adam, {"betas": (0.0, 0.99)}, {}),
    ("AdamW", torch.optim.AdamW, {"weight_decay": 0.1}, {"decoupled_weight_decay": True}),
    (
        "AdamW maximize",
        torch.optim.AdamW,
        {"weight_decay": 0.1, "maximize": True},
        {"decoupled_weight_decay": True},
    ),
    ("NAdam", torch.optim.NAdam, {"momentum_decay": 4e-3}, {}),
    ("NAdam with L2", torch.optim.NAdam, {"momentum_decay": 0.1, "weight_decay": 0.05}, {}),
    (
        "NAdam decoupled",
        torch.optim.NAdam,
        {"momentum_decay": 4e-3, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {},
    ),
]
_IDS = [o[0] for o in _OPTIMIZERS]
_SHAPES = [(17,), (4, 5), (3, 2, 2), (1,), (0,), (129,)]
_STEPS = 60


def _run(
    start: list[Tensor], gradients: list[list[Tensor]], options: dict[str, Any]
) -> list[Tensor]:
    w = [t.clone() for t in start]
    m, u = [torch.zeros_like(t) for t in w], [torch.zeros_like(t) for t in w]
    hyper = Adam(lr=0.01, step=1, **options)
    for i, g in enumerate(gradients, start=1):
        st.adam_step_(w, g, m, u, **keywords(hyper.at(i)))
    return w


def _torch_run(
    kind: type[torch.optim.Optimizer],
    start: list[Tensor],
    gradients: list[list[Tensor]],
    options: dict[str, Any],
) -> list[Tensor]:
    params = [torch.nn.Parameter(t.clone()) for t in start]
    opt = kind(params, lr=0.01, **options)  # type: ignore[call-arg]
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        opt.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize(("name", "kind", "options", "ours"), _OPTIMIZERS, ids=_IDS)
def test_torch_over_many_steps_in_float64(
    name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any], ours: dict[str, Any]
) -> None:
    start = [torch.randn(s, dtype=torch.float64) for s in _SHAPES]
    gradients = [[torch.randn_like(t) for t in start] for _ in range(_STEPS)]
    expected = _torch_run(kind, start, gradients, options)
    got = _run(start, gradients, {**options, **ours})
    for i, (a, e) in enumerate(zip(got, expected, strict=True)):
        # NAdam: torch keeps mu_product in float32, accurate to 1e-6 of a step of 0.01.
        loose = 1e-8 if kind is torch.optim.NAdam else 1e-13
        torch.testing.assert_close(a, e, rtol=1e-11, atol=loose, msg=f"{name}, tensor {i}")


@pytest.mark.parametrize(("name", "kind", "options", "ours"), _OPTIMIZERS, ids=_IDS)
def test_torch_over_many_steps_in_float32(
    name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Beside float64: an update is lr times a number below 5 (gradients are), good to 20 roundings.

    Weights stay below 8, so each of n steps adds half an ulp of 8 at most, and 100*2^-24*lr for
    what comes in with the update. As near as torch's own float32 run is not asked for: both obey
    the bound.
    """
    start = [torch.randn(s) for s in _SHAPES]
    gradients = [[torch.randn_like(t) for t in start] for _ in range(_STEPS)]
    exact = _torch_run(
        kind, [t.double() for t in start], [[g.double() for g in gs] for gs in gradients], options
    )
    bound = _STEPS * (2.0**-21 / 2 + 100 * 2.0**-24 * 0.01)
    for run in (
        _run(start, gradients, {**options, **ours}),
        _torch_run(kind, start, gradients, options),
    ):
        for a, e in zip(run, exact, strict=True):
            assert a.numel() == 0 or float((a.double() - e).abs().max()) <= bound, name


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "kind", "options", "ours"), _OPTIMIZERS[1::2], ids=_IDS[1::2])
def test_many_steps_bit_for_bit(
    name: str,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    ours: dict[str, Any],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    w = torch.randn(201).to(dtypes[0])
    m, u = torch.zeros(201, dtype=dtypes[1]), torch.zeros(201, dtype=dtypes[1])
    expected = w.clone(), m.clone(), u.clone()
    for i in range(1, 21):
        g = torch.randn(201).to(dtypes[0])
        hyper = Adam(lr=0.01, step=1, **options, **ours).at(i)
        expected = hyper.updated(expected[0], g, expected[1], expected[2])
        st.adam_step_(w, g, m, u, **keywords(hyper))
    ref.assert_lists([w, m, u], list(expected), name)


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[1], DTYPES[5]], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_sizes_around_blocks_chunks_and_streamed_outputs(
    offset: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Also more bytes than a cache holds, where outputs bypass it."""
    sizes = [1023, 1024, 1025, 4095, 4097, 16385, 300_001]
    rng = np.random.default_rng(offset)

    def stream(dtype: torch.dtype, at: int, kind: str = "normal") -> list[Guarded]:
        return [
            Guarded(contiguous(n).at(at), dtype).filled(values(rng, kind, n, dtype)) for n in sizes
        ]

    w, g = stream(dtypes[0], offset), stream(dtypes[0], offset)
    m, u = stream(dtypes[1], offset), stream(dtypes[1], 2 * offset)
    for t in tensors(u):
        t.abs_()
    outs = [stream(dtypes[0], offset * j) for j in range(2)]
    hyper = Adam(lr=0.01, step=3, weight_decay=0.1, decoupled_weight_decay=True)
    expected = [hyper.updated(*row) for row in zip(*map(tensors, (w, g, m, u)), strict=True)]
    chosen = [laws.Linear(3.0), laws.Geometric(5)]
    st.adam_step_(
        *map(tensors, (w, g, m, u)),
        predict=[(law, tensors(out)) for law, out in zip(chosen, outs, strict=True)],
        **keywords(hyper),
    )
    for k, (name, got) in enumerate((("params", w), ("exp_avgs", m), ("exp_avg_sqs", u))):
        ref.assert_lists(tensors(got), [e[k] for e in expected], name)
    for law, out in zip(chosen, outs, strict=True):
        terms = law.adam(checked(hyper))
        later = [
            predict_adam(terms, *row, eps=hyper.eps)
            for row in zip(*map(tensors, (w, m, u)), strict=True)
        ]
        ref.assert_lists(tensors(out), later, str(law))
        check_guards(out=out)
    check_guards(w=w, g=g, m=m, u=u)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    n = 150_001
    start = [torch.randn(n), torch.randn(n), torch.randn(n), torch.randn(n).abs()]
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        w, g, m, u = (t.clone() for t in start)
        out = torch.empty(n)
        st.adam_step_(w, g, m, u, lr=0.1, step=2, predict=[(laws.Geometric(3), out)])
        results.append([w, m, u, out])
    ref.assert_lists(results[1], results[0], "with more threads", exact=True)


def test_what_does_not_move_keeps_its_weights() -> None:
    """A rate of 0, or one that vanishes in float32, with moments of 0 and infinity."""
    w = torch.tensor([1.0, -0.0, 2.0, 0.0])
    m = torch.tensor([math.inf, 1.0, 0.0, math.nan])
    u = torch.tensor([math.inf, 0.0, 0.0, math.nan])
    for lr in (0.0, 1e-60):
        for steps in (0, 3.0, laws.Geometric(2)):
            got = st.adam_predict(w, m, u, lr=lr, step=1, steps=steps, eps=0.0)
            ref.assert_bits(got, w, f"lr {lr}, steps {steps}")


def test_missing_gradients_leave_their_tensors_and_outs_receive_the_weights() -> None:
    lists = [[torch.rand(9) for _ in range(4)] for _ in range(4)]
    w, m, u, out = lists
    before = [[t.clone() for t in x] for x in lists]
    g: list[Tensor | None] = [torch.randn(9), None, torch.randn(9), None]
    law = laws.SecondOrder(2.0, 1.0)
    versions = [t._version for x in lists for t in x]
    st.adam_step_(w, g, m, u, lr=0.1, step=1, predict=[(law, out)])
    for i in (1, 3):
        for k, name in enumerate(("params", "exp_avgs", "exp_avg_sqs")):
            ref.assert_bits(lists[k][i], before[k][i], f"{name}[{i}]")
        ref.assert_bits(out[i], before[0][i], f"out[{i}]")
    for i in (0, 2):
        assert not torch.equal(w[i], before[0][i]) and not torch.equal(out[i], w[i])
    bumped = [t._version - v for t, v in zip((t for x in lists for t in x), versions, strict=True)]
    assert bumped == [1, 0, 1, 0] * 3 + [1, 1, 1, 1]


def test_step_counts_of_any_kind_are_the_same_number() -> None:
    """torch's optimizers keep the step in a float32 tensor."""
    given_ = [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3.0), torch.tensor(3)]
    results = []
    for step in given_:
        w, m, u = torch.ones(5).double(), torch.zeros(5).double(), torch.zeros(5).double()
        st.adam_step_(w, torch.ones(5).double(), m, u, lr=0.1, step=step, weight_decay=0.1)  # type: ignore[arg-type]
        results.append(w)
    for step, w in zip(given_, results, strict=True):
        ref.assert_bits(w, results[0], repr(step))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-24, 1e18, 1e19, 1e20])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam"])
def test_extreme_gradients_are_taken_as_torch_takes_them(name: str, magnitude: float) -> None:
    """The square of 1e20 overflows float32; (1 - beta2)*g*g in torch's order does not."""
    gradients = [magnitude, -magnitude, 1.0, -1e-3 * magnitude]
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    mine = getattr(st.optim, name)([p], lr=1e-2)
    theirs = getattr(torch.optim, name)([q], lr=1e-2, foreach=False)
    for factor in (1.0, 0.5, -0.25):
        for x in (p, q):
            x.grad = factor * torch.tensor(gradients)
        mine.step()
        theirs.step()
        state = mine.state[p]
        assert (
            p.isfinite().all()
            and (magnitude < 1.0 or p.ne(1.0).all())
            and state["exp_avg_sq"].isfinite().all()
        )
        if (name, magnitude) != ("NAdam", 1e20):  # torch divides its u by 1 - beta2: infinite
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(
            state["exp_avg_sq"], theirs.state[q]["exp_avg_sq"], rtol=1e-5, atol=0.0
        )
