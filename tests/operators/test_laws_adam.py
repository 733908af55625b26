"""Tests prediction laws with Adam, AdamW and NAdam against their definitions in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as hs
import pytest
import torch
from hypothesis import given
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.laws import MAX_TERMS, Geometric, Law, Linear, SecondOrder
from spectrain_ext.operators.numbers import Adam


@hs.composite
def adams(draw: hs.DrawFn, *, nadam: bool | None = None) -> Adam:
    """The three optimizers after any number of updates."""
    beta1 = draw(hs.one_of(hs.sampled_from([0.9, 0.99, 0.5]), hs.floats(0.01, 0.999)))
    step = draw(hs.integers(1, 2000))
    is_nadam = draw(hs.booleans()) if nadam is None else nadam
    decay = draw(hs.sampled_from([4e-3, 0.1])) if is_nadam else None
    product = math.prod(_mu(beta1, decay, i) for i in range(1, step + 1)) if decay else 1.0
    return Adam(
        lr=draw(hs.floats(1e-5, 0.5)),
        betas=(beta1, draw(hs.sampled_from([0.999, 0.9, 0.99]))),
        eps=draw(hs.sampled_from([1e-8, 1e-3])),
        weight_decay=draw(hs.sampled_from([0.0, 0.01, 0.3])),
        step=step,
        decoupled_weight_decay=draw(hs.booleans()),
        momentum_decay=decay,
        mu_product=product,
    )


def _mu(beta1: float, momentum_decay: float, step: int) -> float:
    """Dozat's schedule of NAdam's momentum, with torch's constant."""
    return beta1 * (1 - 0.5 * 0.96 ** (step * momentum_decay))


def moments(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """W, m and u."""
    w, m = torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    return w, m, torch.rand(n, dtype=torch.float64) + 0.01


def predicted(numbers: Adam, law: Law, w: Tensor, m: Tensor, u: Tensor) -> Tensor:
    """Return the operators' predictions by a law."""
    out = torch.full_like(w, math.nan)
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, outs=[out])
    plan.predict([numbers], steps=law)
    return out


def ahead(numbers: Adam, m: Tensor, u: Tensor, i: int, lr: float) -> Tensor:
    """Return the movement by a first moment m in update step + i, with bias correction."""
    t = numbers.step + i
    denominator = u.sqrt() / math.sqrt(1 - numbers.betas[1] ** t) + numbers.eps
    if numbers.momentum_decay is None:
        return lr * (m / (1 - numbers.betas[0] ** t)) / denominator
    product = numbers.mu_product
    for j in range(1, i + 1):
        product *= _mu(numbers.betas[0], numbers.momentum_decay, numbers.step + j)
    following = _mu(numbers.betas[0], numbers.momentum_decay, t + 1)
    return lr * following * m / (1 - product * following) / denominator


def loop(numbers: Adam, w: Tensor, m: Tensor, u: Tensor, rates: list[float]) -> Tensor:
    """FTPipe's msnag: for i = 1..s, AdamW's decay and then a step without a gradient."""
    for i, lr in enumerate(rates, start=1):
        m = numbers.betas[0] * m
        if numbers.decoupled_weight_decay:
            w = w * (1 - lr * numbers.weight_decay)
        w = w - ahead(numbers, m, u, i, lr)
    return w


def close(actual: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Compare to 1e-12 of the summed terms."""
    error = ((actual - expected).abs() / (expected.abs() + scale.abs() + 1e-30)).max()
    assert float(error) <= 1e-12, f"relative error {float(error):.2e}"


def far(numbers: Adam, w: Tensor, m: Tensor, u: Tensor, n: float) -> Tensor:
    """Return how large the terms of n updates can be together."""
    return w.abs() + n * ahead(numbers, m.abs(), u, 0, max(numbers.lr, 0.5))


@given(numbers=adams(), steps=hs.floats(0, 100))
def test_linear(numbers: Adam, steps: float) -> None:
    """The momentum part of the last update, s times, without decay and gradient."""
    w, m, u = moments()
    expected = w - steps * ahead(numbers, m, u, 0, numbers.lr)
    close(predicted(numbers, Linear(steps), w, m, u), expected, far(numbers, w, m, u, steps))


@given(numbers=adams(), steps=hs.integers(0, MAX_TERMS))
def test_loop(numbers: Adam, steps: int) -> None:
    w, m, u = moments()
    expected = loop(numbers, w, m, u, [numbers.lr] * steps)
    close(predicted(numbers, Geometric(steps), w, m, u), expected, far(numbers, w, m, u, steps))


@given(numbers=adams(nadam=False), delay=hs.floats(0, 31), share=hs.floats(-1, 1))
def test_second_order(numbers: Adam, delay: float, share: float) -> None:
    """With m_prev kept here: m one update earlier, under the same denominator."""
    lead = max(-delay, 31 * share)
    w, m, u = moments()
    g, out, m_prev = torch.randn_like(w), torch.empty_like(w), m.clone()
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=[out])
    plan.adam_step_([numbers], predict=[SecondOrder(delay, lead)])
    change = delay * (delay + 1) / 2
    far_m = (delay + lead) * m + change * (m - m_prev)
    expected = w - ahead(numbers, far_m, u, 0, numbers.lr)
    largest = (delay + lead + change / numbers.betas[0]) * (m.abs() + m_prev.abs() + g.abs())
    close(out, expected, w.abs() + ahead(numbers, largest, u, 0, numbers.lr))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_second_order_over_a_run(decoupled: bool, maximize: bool) -> None:
    """From the first step on, whose m_prev is 0."""
    w, m, u, out = torch.randn(20).double(), *(torch.zeros(20).double() for _ in range(3))
    law = SecondOrder(3, 1)
    for i in range(1, 8):
        m_prev = m.clone()
        st.adam_step_(
            w, torch.randn(20).double(), m, u, lr=0.01, step=i, weight_decay=0.1,
            decoupled_weight_decay=decoupled, maximize=maximize, predict=[(law, out)],
        )  # fmt: skip
        denominator = u.sqrt() / math.sqrt(1 - 0.999**i) + 1e-8
        expected = w - 0.01 / (1 - 0.9**i) * (4 * m + 6 * (m - m_prev)) / denominator
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam"])
def test_the_loop_is_what_torch_does_without_gradients(kind: str) -> None:
    """torch also decays the second moment; with that restored before every step, they agree."""
    p = torch.nn.Parameter(torch.randn(30, dtype=torch.float64))
    options = {"lr": 0.05, "weight_decay": 0.2 if kind == "AdamW" else 0.0}
    opt = getattr(torch.optim, kind)([p], **options)
    for _ in range(5):
        p.grad = torch.randn_like(p)
        opt.step()
    state = opt.state[p]
    w, m, u = p.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    numbers = Adam(
        betas=(0.9, 0.999), eps=1e-8, step=5, decoupled_weight_decay=kind == "AdamW",
        momentum_decay=4e-3 if kind == "NAdam" else None,
        mu_product=float(state["mu_product"]) if kind == "NAdam" else 1.0,
        **options,
    )  # fmt: skip
    for _ in range(6):
        p.grad = torch.zeros_like(p)
        state["exp_avg_sq"].copy_(u / 0.999)
        opt.step()
    # NAdam's product of all mu is float32 in torch: accurate to 1e-7 of a step.
    loose = 1e-7 if kind == "NAdam" else 1e-12
    got = predicted(numbers, Geometric(6), w, m, u)
    torch.testing.assert_close(got, p.detach(), rtol=1e-12, atol=loose)


@given(numbers=adams())
def test_one_linear_step_is_one_step_of_the_last_direction(numbers: Adam) -> None:
    """Linear(1) moves by the last update (for Adam; NAdam without its gradient part)."""
    numbers = replace(numbers, weight_decay=0.0, momentum_decay=None, mu_product=1.0)
    w, m, u = moments()
    before, g = w.clone(), torch.randn_like(w)
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g)
    plan.adam_step_([numbers])
    got = predicted(numbers, Linear(1.0), w, m, u)
    close(got - w, w - before, 4 * w)


class TestErrors:
    """Errors of laws under Adam."""

    _ADAM = Adam(0.1, (0.9, 0.999), 1e-8, 0.0, 1)

    @pytest.mark.parametrize("steps", [0.5, 2.5])
    def test_the_loop_needs_whole_steps(self, steps: float) -> None:
        with pytest.raises(ValueError, match=r"steps.*whole"):
            Geometric(steps).adam(self._ADAM)

    @pytest.mark.parametrize("n", [MAX_TERMS + 1, 1000])
    def test_the_loop_has_room_for_so_many_updates(self, n: int) -> None:
        with pytest.raises(ValueError, match=rf"{MAX_TERMS}.*{n}"):
            Geometric(n).adam(self._ADAM)

    def test_an_absurd_number_of_steps_is_refused_at_once(self) -> None:
        with pytest.raises(ValueError, match="64"):
            Geometric(1e15).adam(self._ADAM)

    def test_only_a_step_can_write_second_order(self) -> None:
        w, m, u = moments()
        before = w.clone()
        with pytest.raises(ValueError, match="gradient"):
            st.adam_predict(w, m, u, lr=0.1, step=1, steps=SecondOrder(2.0))
        with pytest.raises(ValueError, match="gradient"):
            st.Plan(w, exp_avgs=m, exp_avg_sqs=u).predict_([self._ADAM], steps=SecondOrder(2.0))
        assert torch.equal(w, before)

    def test_second_order_needs_momentum(self) -> None:
        numbers = replace(self._ADAM, betas=(0.0, 0.99))
        with pytest.raises(ValueError, match="momentum"):
            SecondOrder(2.0).adam(numbers)

    def test_a_law_that_fails_leaves_everything_as_it_was(self) -> None:
        w, m, u = moments()
        out, g = torch.zeros_like(w), torch.randn_like(w)
        before = [t.clone() for t in (w, m, u, out)]
        for law in (Geometric(65), Geometric(1.5)):
            with pytest.raises(ValueError, match="steps"):
                st.adam_step_(w, g, m, u, lr=0.1, step=1, predict=[(1.0, out), (law, out.clone())])
        assert all(torch.equal(a, b) for a, b in zip((w, m, u, out), before, strict=True))
