"""Tests sgd_step_: torch.optim.SGD's arithmetic, and predictions in the same pass."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.strategies as hs
import pytest
import torch
from helpers import ops_reference as ref
from helpers.ops_tensors import DTYPES, Case, Guarded, cases, check_guards, horizons, rates, tensors
from hypothesis import given
from torch import Tensor

import spectrain_ext as st


@hs.composite
def hypers(draw: hs.DrawFn, *, momentum: bool | None = None) -> ref.SGD:
    """Draw every option; Nesterov only where torch accepts it, an average only where valid."""
    with_momentum = draw(hs.booleans()) if momentum is None else momentum
    mu = draw(hs.sampled_from([0.9, 0.5, 0.99, 1.0])) if with_momentum else 0.0
    nesterov = with_momentum and draw(hs.booleans())
    smoothed = 0.0 < mu < 1.0 and draw(hs.booleans())
    return ref.SGD(
        lr=draw(rates()),
        momentum=mu,
        dampening=0.0 if nesterov or smoothed else draw(hs.sampled_from([0.0, 0.1, 1.0])),
        weight_decay=draw(hs.sampled_from([0.0, 0.01, 1e-4, 2.0])),
        nesterov=nesterov,
        maximize=draw(hs.booleans()),
        decoupled_weight_decay=draw(hs.booleans()),
        smoothed=smoothed,
    )


@given(case=cases(), hyper=hypers(), data=hs.data())
def test_one_step(case: Case, hyper: ref.SGD, data: hs.DataObject) -> None:
    n = len(case.rows)
    w, g, v = case.stream(0), case.stream(1), case.stream(2, momentum=True)
    missing = data.draw(hs.lists(hs.booleans(), min_size=n, max_size=n), label="missing")
    first: bool | list[bool] = data.draw(
        hs.one_of(hs.booleans(), hs.lists(hs.booleans(), min_size=n, max_size=n)), label="first"
    )
    flags = [first] * n if isinstance(first, bool) else first
    grads = [None if m else t for m, t in zip(missing, tensors(g), strict=True)]
    horizon = (
        data.draw(hs.lists(horizons(), max_size=3), label="horizons") if hyper.momentum else []
    )
    outs = [case.stream(3 + j) for j in range(len(horizon))]
    expected = [
        hyper.step(a.tensor, b, c.tensor, first=f)
        for a, b, c, f in zip(w, grads, v, flags, strict=True)
    ]
    old_g = [ref.clone(t) for t in tensors(g)]
    single_first = flags[0] if case.single else first
    st.sgd_step_(
        case.given(w),
        grads[0] if case.single else grads,
        case.given(v),
        first_step=single_first,
        predict=[(s, case.given(out)) for s, out in zip(horizon, outs, strict=True)],
        **hyper.keywords(),
    )
    ref.assert_lists(tensors(w), [x for x, _ in expected], "params")
    ref.assert_lists(tensors(v), [x for _, x in expected if x is not None], "momentum_buffers")
    ref.assert_lists(tensors(g), old_g, "grads", exact=True)
    for j, (s, out) in enumerate(zip(horizon, outs, strict=True)):
        for i, o in enumerate(tensors(out)):
            label = f"predict[{j}][{i}], steps {s}"
            if missing[i]:
                ref.assert_bits(o, tensors(w)[i], label)
            else:
                later = st.predict(tensors(w)[i], tensors(v)[i], lr=hyper.lr, steps=s)
                ref.assert_same(o, later, label)
    check_guards(params=w, grads=g, momentum_buffers=v)
    for j, out in enumerate(outs):
        check_guards(**{f"predict{j}": out})


@given(case=cases(), hyper=hypers(momentum=False))
def test_without_momentum_no_buffer_is_needed(case: Case, hyper: ref.SGD) -> None:
    w, g = case.stream(0), case.stream(1)
    expected = [hyper.step(a.tensor, b.tensor, None)[0] for a, b in zip(w, g, strict=True)]
    st.sgd_step_(case.given(w), case.given(g), None, **hyper.keywords())
    ref.assert_lists(tensors(w), expected, "params")
    check_guards(params=w, grads=g)


def test_without_momentum_a_buffer_is_not_touched() -> None:
    w, g = torch.randn(100), torch.randn(100)
    v = torch.full((100,), math.nan)
    before = v.clone()
    st.sgd_step_(w, g, v, lr=0.1, momentum=0.0)
    ref.assert_bits(v, before, "momentum_buffers")
    assert not bool(w.isnan().any())


def _options() -> list[dict[str, Any]]:
    out = []
    for mu, damp, decay, nesterov, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (0.0, 0.05), (False, True), (False, True)
    ):
        if not nesterov or (mu > 0 and damp == 0):
            out.append(
                {
                    "lr": 0.05,
                    "momentum": mu,
                    "dampening": damp,
                    "weight_decay": decay,
                    "nesterov": nesterov,
                    "maximize": maximize,
                }
            )
    return out


_OPTIONS = _options()


def _name(options: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items() if v and k != "lr")


def _torch_run(
    start: list[Tensor], grads: list[list[Tensor]], options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor | None]]:
    params = [torch.nn.Parameter(t.clone()) for t in start]
    opt = torch.optim.SGD(params, **options)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        opt.step()
    return [p.detach() for p in params], [opt.state[p].get("momentum_buffer") for p in params]


def _run(
    start: list[Tensor], grads: list[list[Tensor]], options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    params = [t.clone() for t in start]
    buffers = [torch.full_like(t, math.nan) for t in start]
    for i, step in enumerate(grads):
        st.sgd_step_(params, step, buffers, first_step=i == 0, **options)
    return params, buffers


_SHAPES = [(17,), (4, 5), (3, 2, 2), (1,), (0,), (129,)]


@pytest.mark.parametrize("options", _OPTIONS, ids=_name)
def test_torch_over_many_steps_in_float64(options: dict[str, Any]) -> None:
    start = [torch.randn(s, dtype=torch.float64) for s in _SHAPES]
    grads = [[torch.randn_like(t) for t in start] for _ in range(60)]
    expected, expected_v = _torch_run(start, grads, options)
    got, got_v = _run(start, grads, options)
    for i in range(len(start)):
        torch.testing.assert_close(got[i], expected[i], rtol=1e-12, atol=1e-13)
        if expected_v[i] is not None:
            torch.testing.assert_close(got_v[i], expected_v[i], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", _OPTIONS, ids=_name)
def test_torch_over_many_steps_in_float32(options: dict[str, Any]) -> None:
    """Bound: in n steps at most 4n roundings of half an ulp of the largest value met.

    Momentum amplifies an error of v by at most 1/(1-mu) = 10 over all later steps, and lr = 0.05
    takes that below 1 again.
    """
    steps = 40
    start = [torch.randn(s) for s in _SHAPES]
    grads = [[torch.randn_like(t) for t in start] for _ in range(steps)]
    exact, _ = _torch_run(
        [t.double() for t in start], [[g.double() for g in gs] for gs in grads], options
    )
    got, _ = _run(start, grads, options)
    for i, (a, e) in enumerate(zip(got, exact, strict=True)):
        largest = max(1.0, float(e.abs().max()) if e.numel() else 0.0) + 10.0
        bound = 4 * steps * 0.5 * float(ref.ulp(torch.tensor(largest, dtype=torch.float64)))
        assert a.numel() == 0 or float((a.double() - e).abs().max()) <= bound, i


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("options", _OPTIONS[::3], ids=_name)
def test_many_steps_bit_for_bit(
    options: dict[str, Any], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    hyper = ref.SGD(**options)
    w = torch.randn(201).to(dtypes[0])
    v = torch.zeros(201, dtype=dtypes[1])
    expected, expected_v = w.clone(), v.clone()
    for i in range(20):
        g = torch.randn(201).to(dtypes[0])
        expected, new_v = hyper.step(expected, g, expected_v, first=i == 0)
        assert new_v is not None
        expected_v = new_v
        st.sgd_step_(w, g, v, first_step=i == 0, **options)
    ref.assert_same(w, expected, "params")
    ref.assert_same(v, expected_v, "momentum_buffers")


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_what_torch_has_not_against_plain_arithmetic(
    smoothed: bool, decoupled: bool, nesterov: bool
) -> None:
    """v = mu*v + (1-mu)*d as in the paper; decay that does not enter the momentum."""
    lr, mu, decay = 0.05, 0.9, 0.3
    w, v = torch.randn(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    our_w, our_v = w.clone(), v.clone()
    for i in range(40):
        g = torch.randn(50, dtype=torch.float64)
        d = g if decoupled else g + decay * w
        gain = 1 - mu if smoothed else 1.0
        v = d.clone() if i == 0 else mu * v + gain * d
        if decoupled:
            w = w - lr * decay * w
        w = w - lr * (gain * d + mu * v if nesterov else v)
        st.sgd_step_(
            our_w, g, our_v, lr=lr, momentum=mu, weight_decay=decay, nesterov=nesterov,
            decoupled_weight_decay=decoupled, smoothed=smoothed, first_step=i == 0,
        )  # fmt: skip
    torch.testing.assert_close(our_w, w, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(our_v, v, rtol=1e-12, atol=1e-13)


def test_an_average_is_a_sum_with_another_learning_rate() -> None:
    """v_smoothed = (1-mu)*v_sum if both start from 0, and step and prediction agree."""
    start, mu = torch.randn(30, dtype=torch.float64), 0.9
    runs = []
    for smoothed in (False, True):
        w, v, out = start.clone(), torch.zeros_like(start), torch.empty_like(start)
        torch.manual_seed(1)
        for _ in range(20):
            g = torch.randn_like(w)
            lr = 0.05 / (1 - mu) if smoothed else 0.05
            st.sgd_step_(w, g, v, lr=lr, momentum=mu, smoothed=smoothed, predict=[(4.0, out)])
        runs.append((w, out))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("maximize", [False, True])
def test_decoupled_decay_without_momentum(maximize: bool) -> None:
    w, g = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    expected = w * (1 - 0.1 * 0.2) + (0.1 if maximize else -0.1) * g
    st.sgd_step_(
        w, g, None, lr=0.1, momentum=0.0, weight_decay=0.2, decoupled_weight_decay=True,
        maximize=maximize,
    )  # fmt: skip
    torch.testing.assert_close(w, expected, rtol=1e-14, atol=1e-15)


def test_first_step_is_per_tensor() -> None:
    w = [torch.zeros(5), torch.zeros(5)]
    g = [torch.full((5,), 1.0), torch.full((5,), 1.0)]
    v = [torch.full((5,), 8.0), torch.full((5,), 8.0)]
    st.sgd_step_(w, g, v, lr=1.0, momentum=0.5, first_step=[True, False])
    assert v[0].tolist() == [1.0] * 5 and v[1].tolist() == [5.0] * 5
    assert w[0].tolist() == [-1.0] * 5 and w[1].tolist() == [-5.0] * 5


def test_first_step_ignores_what_the_buffer_holds_and_dampening() -> None:
    w, g, v = torch.zeros(7), torch.ones(7), torch.full((7,), math.nan)
    st.sgd_step_(w, g, v, lr=1.0, momentum=0.9, dampening=0.5, first_step=True)
    assert v.tolist() == [1.0] * 7 and w.tolist() == [-1.0] * 7


def test_missing_gradients_leave_their_tensors_and_outs_receive_the_weights() -> None:
    w, v = [torch.randn(9) for _ in range(4)], [torch.randn(9) for _ in range(4)]
    g: list[Tensor | None] = [torch.randn(9), None, torch.randn(9), None]
    outs = [torch.full((9,), math.nan) for _ in range(4)]
    before_w, before_v = [t.clone() for t in w], [t.clone() for t in v]
    st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, predict=[(3.0, outs)])
    for i in (1, 3):
        ref.assert_bits(w[i], before_w[i], f"params[{i}]")
        ref.assert_bits(v[i], before_v[i], f"momentum_buffers[{i}]")
        ref.assert_bits(outs[i], before_w[i], f"outs[{i}]")
    for i in (0, 2):
        assert not torch.equal(w[i], before_w[i])
        ref.assert_bits(outs[i], st.predict(w[i], v[i], lr=0.1, steps=3.0), f"outs[{i}]")


def test_all_gradients_missing() -> None:
    w, v, out = torch.randn(5), torch.randn(5), torch.zeros(5)
    before = w.clone()
    st.sgd_step_([w], [None], [v], lr=0.1, momentum=0.9, predict=[(2.0, [out])])
    ref.assert_bits(w, before, "params")
    ref.assert_bits(out, before, "out")


@pytest.mark.parametrize("count", [1, 2, 8, 9, 17])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_any_number_of_predictions(count: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """More predictions than one kernel writes need further passes, with the same bits."""
    w = torch.randn(1000).to(dtypes[0])
    g = torch.randn(1000).to(dtypes[0])
    v = torch.randn(1000).to(dtypes[1])
    horizon = [float(j % 5) for j in range(count)]
    outs = [torch.empty_like(w) for _ in range(count)]
    st.sgd_step_(
        w, g, v, lr=0.1, momentum=0.9, nesterov=True, predict=list(zip(horizon, outs, strict=True))
    )
    for j, out in enumerate(outs):
        ref.assert_bits(out, st.predict(w, v, lr=0.1, steps=horizon[j]), f"predict[{j}]")


def test_zero_steps_with_infinite_momentum_copies_the_new_weights() -> None:
    w, g = torch.zeros(3), torch.zeros(3)
    v = torch.tensor([math.inf, -math.inf, math.nan])
    out = torch.zeros(3)
    st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, predict=[(0.0, out)])
    ref.assert_bits(out, w, "out")


@pytest.mark.parametrize("lr", [0.0, 1e-60])
def test_predictions_equal_a_later_predict_where_lr_times_steps_vanishes(lr: float) -> None:
    """A learning rate of zero, or too small for float32, with infinities and signed zeros."""
    w = torch.tensor([1.0, -0.0, -0.0, 0.0])
    v = torch.tensor([math.inf, 1.0, -1.0, math.nan])
    out = torch.empty(4)
    st.sgd_step_(w, torch.zeros(4), v, lr=lr, momentum=1.0, predict=[(2.0, out)])
    ref.assert_same(out, st.predict(w, v, lr=lr, steps=2.0), "out")


def test_strided_gradient_of_a_guarded_view() -> None:
    """A permuted parameter with a gradient of the same strides in another buffer."""
    from helpers.ops_tensors import Layout

    layout = Layout((5, 6, 7), (2, 0, 1))
    w = Guarded(layout.at(3), torch.float32).filled(torch.randn(210))
    g = Guarded(layout.at(1), torch.float32).filled(torch.randn(210))
    v = Guarded(layout, torch.float32).filled(torch.randn(210))
    hyper = ref.SGD(lr=0.1, momentum=0.9)
    expected, _ = hyper.step(w.tensor, g.tensor, v.tensor)
    st.sgd_step_(w.tensor, g.tensor, v.tensor, **hyper.keywords())
    ref.assert_same(w.tensor, expected, "params")
    check_guards(w=[w], g=[g], v=[v])
