"""Tests prediction laws against their definitions in float64, and the errors of laws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as hs
import pytest
import torch
from helpers.bad_input import raises
from helpers.ops_reference import Numbers, keywords, nadam_mu, nadam_product
from hypothesis import given, settings
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws

_MAX_TERMS = 64  # updates ahead that one kernel makes under Adam


@hs.composite
def sgds(draw: hs.DrawFn, *, decay: bool | None = None) -> laws.SgdNumbers:
    mu = draw(hs.one_of(hs.sampled_from([0.9, 0.99, 0.5]), hs.floats(0.01, 0.999)))
    kind = draw(hs.sampled_from(["sum", "dampened", "nesterov", "smoothed", "smoothed nesterov"]))
    with_decay = draw(hs.booleans()) if decay is None else decay
    return laws.SgdNumbers(
        lr=draw(hs.floats(1e-4, 0.5)),
        momentum=mu,
        dampening=draw(hs.sampled_from([0.1, 1.0])) if kind == "dampened" else 0.0,
        weight_decay=draw(hs.floats(1e-4, 0.5)) if with_decay else 0.0,
        nesterov="nesterov" in kind,
        decoupled_weight_decay=draw(hs.booleans()),
        smoothed="smoothed" in kind,
    )


@hs.composite
def adams(draw: hs.DrawFn, *, nadam: bool | None = None) -> laws.AdamNumbers:
    """The three optimizers after any number of updates."""
    beta1 = draw(hs.one_of(hs.sampled_from([0.9, 0.99, 0.5]), hs.floats(0.01, 0.999)))
    step = draw(hs.integers(1, 2000))
    is_nadam = draw(hs.booleans()) if nadam is None else nadam
    decay = draw(hs.sampled_from([4e-3, 0.1])) if is_nadam else None
    return laws.AdamNumbers(
        lr=draw(hs.floats(1e-5, 0.5)),
        betas=(beta1, draw(hs.sampled_from([0.999, 0.9, 0.99]))),
        eps=draw(hs.sampled_from([1e-8, 1e-3])),
        weight_decay=draw(hs.sampled_from([0.0, 0.01, 0.3])),
        step=step,
        decoupled_weight_decay=draw(hs.booleans()),
        momentum_decay=decay,
        mu_product=nadam_product(beta1, decay, step) if decay else 1.0,
    )


def random(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, v or m, and u."""
    return *torch.randn(2, n, dtype=torch.float64), torch.rand(n, dtype=torch.float64) + 0.01


def predicted(numbers: Numbers, law: laws.Law, w: Tensor, m: Tensor, u: Tensor) -> Tensor:
    out = torch.full_like(w, math.nan)
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, outs=[out])
    plan.predict(**keywords(numbers), steps=law)
    return out


def close(actual: Tensor, expected: Tensor, *terms: Tensor) -> None:
    """Compare to 1e-12 of the summed terms."""
    scale = expected.abs() + sum((t.abs() for t in terms), torch.zeros_like(expected))
    error = ((actual - expected).abs() / scale.clamp_min(1e-30)).max()
    assert float(error) <= 1e-12, f"relative error {float(error):.2e}"


# SGD.


def coast(numbers: laws.SgdNumbers, w: Tensor, v: Tensor, steps: int) -> Tensor:
    """Return the weights after updates with zero gradients, as documented for torch.optim.SGD."""
    lr, mu, decay = numbers.lr, numbers.momentum, numbers.weight_decay
    gain = 1 - mu if numbers.smoothed else 1 - numbers.dampening
    for _ in range(steps):
        d = torch.zeros_like(w) if numbers.decoupled_weight_decay else decay * w
        v = mu * v + gain * d
        by = gain * d + mu * v if numbers.nesterov else v
        w = w - (lr * decay * w if numbers.decoupled_weight_decay else 0.0) - lr * by
    return w


@given(numbers=sgds(), s=hs.floats(0, 100), n=hs.integers(0, 40))
def test_linear_and_geometric(numbers: laws.SgdNumbers, s: float, n: int) -> None:
    """W - s*lr*v for every kind of SGD, and n updates with zero gradients."""
    w, v, u = random()
    close(predicted(numbers, laws.Linear(s), w, v, u), w - s * numbers.lr * v, w)
    got = predicted(numbers, laws.Geometric(n), w, v, u)
    close(got, coast(numbers, w, v, n), w, v * numbers.lr * n)


@settings(max_examples=settings().max_examples // 10)
@given(numbers=sgds(decay=True), steps=hs.integers(100, 3000))
def test_geometric_far_ahead(numbers: laws.SgdNumbers, steps: int) -> None:
    """Thousands of updates with decay: a matrix power equals a loop."""
    w, v, u = random(3)
    apart = predicted(numbers, laws.Geometric(steps), w, v, u) - coast(numbers, w, v, steps)
    scale = w.abs().max() + v.abs().max() * numbers.lr / (1 - numbers.momentum)
    assert float(apart.abs().max()) <= 1e-11 * float(scale)


@given(mu=hs.floats(0.01, 0.999), s=hs.floats(0, 50), lr=hs.floats(0, 1), nesterov=hs.booleans())
def test_geometric_by_its_formula(mu: float, s: float, lr: float, nesterov: bool) -> None:
    """Fractional steps too: W - lr*v*(mu - mu^(s+1))/(1 - mu), Nesterov's times mu."""
    w, v, u = random()
    reach = (mu - mu ** (s + 1)) / (1 - mu) * (mu if nesterov else 1.0)
    got = predicted(laws.SgdNumbers(lr, mu, nesterov=nesterov), laws.Geometric(s), w, v, u)
    # Cancellation in mu - mu^(s+1) is not the operator's error: use its input.
    close(got, w - lr * reach * v, w, v * lr / (1 - mu))


def test_geometric_without_damping_is_linear() -> None:
    undamped = laws.SgdNumbers(0.1, 1.0)
    assert laws.Geometric(2.5).sgd(undamped) == laws.Linear(2.5).sgd(undamped)


@given(
    numbers=sgds(),
    delay=hs.one_of(hs.integers(0, 31), hs.floats(0, 10)),
    share=hs.floats(-1, 31),
    first=hs.booleans(),
)
def test_second_order(numbers: laws.SgdNumbers, delay: float, share: float, first: bool) -> None:
    """W - lr*[(D + lead)*v + D*(D+1)/2*(v - v_prev)], with v_prev kept by the test."""
    lead = max(-delay, share)
    w, v, g = random()
    v_prev, out = torch.zeros_like(v) if first else v.clone(), torch.empty_like(w)
    plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
    law = laws.SecondOrder(delay, lead)
    plan.sgd_step_(**keywords(numbers), first_step=first, predict=[law])
    change = delay * (delay + 1) / 2
    expected = w - numbers.lr * ((delay + lead) * v + change * (v - v_prev))
    # v - v_prev follows from the gradient by division by mu.
    close(out, expected, w, *(t * numbers.lr * (change / numbers.momentum) for t in (v, g, w)))


# Adam, AdamW and NAdam.


def move(numbers: laws.AdamNumbers, m: Tensor, u: Tensor, i: int) -> Tensor:
    """Return the movement by a first moment m in update step + i, with bias correction."""
    t, beta1 = numbers.step + i, numbers.betas[0]
    denominator = u.sqrt() / math.sqrt(1 - numbers.betas[1] ** t) + numbers.eps
    if numbers.momentum_decay is None:
        return numbers.lr * (m / (1 - beta1**t)) / denominator
    mus = [nadam_mu(beta1, numbers.momentum_decay, numbers.step + j) for j in range(1, i + 2)]
    product = numbers.mu_product * math.prod(mus)
    return numbers.lr * mus[-1] * m / (1 - product) / denominator


def far(numbers: laws.AdamNumbers, w: Tensor, m: Tensor, u: Tensor, n: float) -> Tensor:
    """Return how large the terms of n updates can be together."""
    return w.abs() + n * move(replace(numbers, lr=0.5), m.abs(), u, 0)


@given(numbers=adams(), s=hs.floats(0, 100), n=hs.integers(0, _MAX_TERMS))
def test_linear_and_geometric_under_adam(numbers: laws.AdamNumbers, s: float, n: int) -> None:
    """The momentum part of the last update, s times, without decay and gradient.

    And FTPipe's msnag: for i = 1..n, AdamW's decay and then a step without a gradient.
    """
    w, m, u = random()
    expected = w - s * move(numbers, m, u, 0)
    close(predicted(numbers, laws.Linear(s), w, m, u), expected, far(numbers, w, m, u, s))
    expected, moment = w, m
    for i in range(1, n + 1):
        moment = numbers.betas[0] * moment
        if numbers.decoupled_weight_decay:
            expected = expected * (1 - numbers.lr * numbers.weight_decay)
        expected = expected - move(numbers, moment, u, i)
    got = predicted(numbers, laws.Geometric(n), w, m, u)
    close(got, expected, far(numbers, w, m, u, n))


@given(numbers=adams(nadam=False), delay=hs.floats(0, 31), share=hs.floats(-1, 1))
def test_second_order_under_adam(numbers: laws.AdamNumbers, delay: float, share: float) -> None:
    """With m_prev kept here: m one update earlier, under the same denominator."""
    lead = max(-delay, 31 * share)
    w, m, u = random()
    g, m_prev, out = torch.randn_like(w), m.clone(), torch.empty_like(w)
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=[out])
    plan.adam_step_(**keywords(numbers), predict=[laws.SecondOrder(delay, lead)])
    change = delay * (delay + 1) / 2
    expected = w - move(numbers, (delay + lead) * m + change * (m - m_prev), u, 0)
    largest = (delay + lead + change / numbers.betas[0]) * (m.abs() + m_prev.abs() + g.abs())
    close(out, expected, w.abs() + move(numbers, largest, u, 0))


# Errors.

_SGD = laws.SgdNumbers(0.1, 0.9)
_ADAM = laws.AdamNumbers(0.1, step=1)


@pytest.mark.parametrize(
    ("law", "numbers", "says"),
    [
        (laws.Geometric(0.5), replace(_SGD, weight_decay=0.1), "steps.*whole.*got 0.5"),
        (laws.Geometric(2.5), _ADAM, "steps.*whole.*got 2.5"),
        (laws.Geometric(_MAX_TERMS + 1), _ADAM, f"steps.*{_MAX_TERMS}.*{_MAX_TERMS + 1}"),
        (laws.Geometric(1e15), _ADAM, f"steps.*{_MAX_TERMS}"),  # at once
        (laws.SecondOrder(2.0), replace(_SGD, momentum=0.0), "momentum: .*momentum > 0"),
        (laws.SecondOrder(2.0), replace(_ADAM, betas=(0.0, 0.9)), r"betas\[0\]: .*momentum > 0"),
    ],
    ids=str,
)
def test_a_law_that_numbers_do_not_allow(law: laws.Law, numbers: Numbers, says: str) -> None:
    """Alone, and in a step, which then changes nothing."""
    w, m, u, g, *outs = lists = [torch.rand(5) for _ in range(6)]
    with pytest.raises(ValueError, match=says):
        law.adam(numbers) if isinstance(numbers, laws.AdamNumbers) else law.sgd(numbers)
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=outs)
    step: Any = plan.adam_step_ if isinstance(numbers, laws.AdamNumbers) else plan.sgd_step_
    own, names = keywords(numbers), "steps|momentum|betas"
    raises(ValueError, names, lambda: step(**own, predict=[1, law]), lists)
    raises(ValueError, names, lambda: plan.predict(**own, steps=law), lists)


def test_only_a_step_can_write_second_order() -> None:
    w, m, u, out = lists = [torch.rand(5) for _ in range(4)]
    law, sgd = laws.SecondOrder(2.0), {"lr": 0.1, "momentum": 0.9}
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, stashed=out)
    for call in (
        lambda: st.predict(w, m, steps=law, out=out, **sgd),
        lambda: st.stash_predict_(w, out, m, steps=law, **sgd),
        lambda: st.adam_predict(w, m, u, lr=0.1, step=1, steps=law, out=out),
        lambda: plan.stash_predict_(lr=0.1, step=1, steps=law),
    ):
        raises(ValueError, "steps: .*gradient", call, lists)
