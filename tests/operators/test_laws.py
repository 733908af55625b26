"""Tests prediction laws with momentum SGD against their definitions in float64.

Adam's are in test_laws_adam.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as hs
import pytest
import torch
from hypothesis import given
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.laws import (
    Geometric,
    Law,
    Linear,
    SecondOrder,
    as_law,
)
from spectrain_ext.operators.numbers import Adam, Sgd


@hs.composite
def sgds(draw: hs.DrawFn, *, decay: bool | None = None) -> Sgd:
    mu = draw(hs.one_of(hs.sampled_from([0.9, 0.99, 0.5]), hs.floats(0.01, 0.999)))
    kind = draw(hs.sampled_from(["sum", "dampened", "nesterov", "smoothed", "smoothed nesterov"]))
    with_decay = draw(hs.booleans()) if decay is None else decay
    return Sgd(
        lr=draw(hs.floats(1e-4, 0.5)),
        momentum=mu,
        dampening=draw(hs.sampled_from([0.1, 1.0])) if kind == "dampened" else 0.0,
        weight_decay=draw(hs.floats(1e-4, 0.5)) if with_decay else 0.0,
        nesterov="nesterov" in kind,
        decoupled_weight_decay=draw(hs.booleans()),
        smoothed="smoothed" in kind,
    )


def weights(n: int = 40) -> tuple[Tensor, Tensor]:
    """W and v."""
    return torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)


def update(numbers: Sgd, w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return one update as documented for torch.optim.SGD, in float64."""
    decay, l2 = numbers.weight_decay, 0.0
    if not numbers.decoupled_weight_decay:
        decay, l2 = 0.0, numbers.weight_decay
    gain = 1 - numbers.momentum if numbers.smoothed else 1 - numbers.dampening
    d = g + l2 * w
    v = numbers.momentum * v + gain * d
    by = gain * d + numbers.momentum * v if numbers.nesterov else v
    return w - numbers.lr * decay * w - numbers.lr * by, v


def coast(numbers: Sgd, w: Tensor, v: Tensor, rates: Sequence[float]) -> Tensor:
    """Return updates with zero gradients, one per learning rate."""
    for lr in rates:
        w, v = update(replace(numbers, lr=lr), w, v, torch.zeros_like(w))
    return w


def predicted(numbers: Sgd, law: Law, w: Tensor, v: Tensor) -> Tensor:
    """Return the operators' predictions by a law."""
    out = torch.full_like(w, math.nan)
    st.Plan(w, momentum_buffers=v, outs=[out]).predict([numbers], steps=law)
    return out


def close(actual: Tensor, expected: Tensor, *terms: Tensor, what: str = "") -> None:
    """Compare to 1e-12 of the summed terms."""
    scale = expected.abs() + sum((t.abs() for t in terms), torch.zeros_like(expected))
    error = ((actual - expected).abs() / scale.clamp_min(1e-30)).max()
    assert float(error) <= 1e-12, f"{what}: relative error {float(error):.2e}"


class TestLinear:
    """W - s*lr*v for every kind of SGD."""

    @given(numbers=sgds(), steps=hs.floats(0, 100))
    def test_definition(self, numbers: Sgd, steps: float) -> None:
        w, v = weights()
        expected = w - steps * numbers.lr * v
        close(predicted(numbers, Linear(steps), w, v), expected, w)
        assert torch.equal(
            predicted(numbers, Linear(steps), w, v), st.predict(w, v, lr=numbers.lr, steps=steps)
        )

    def test_a_number_of_steps_is_linear(self) -> None:
        assert as_law(3) == Linear(3.0) and as_law(2.5) == Linear(2.5)
        assert as_law(torch.tensor(2.0)) == Linear(2.0)
        law = Geometric(3)
        assert as_law(law) is law

    def test_no_steps_have_no_terms(self) -> None:
        for law in (Linear(0), Geometric(0), SecondOrder(0)):
            assert law.sgd(Sgd(0.1, 0.9, weight_decay=0.1)) == []
            assert law.adam(Adam(0.1, (0.9, 0.99), 1e-8, 0.1, 1)) == []


class TestGeometric:
    """Further steps of SGD with zero gradients."""

    @given(numbers=sgds(), steps=hs.integers(0, 40))
    def test_zero_gradients(self, numbers: Sgd, steps: int) -> None:
        w, v = weights()
        expected = coast(numbers, w, v, [numbers.lr] * steps)
        close(predicted(numbers, Geometric(steps), w, v), expected, w, v * numbers.lr * steps)

    @given(numbers=sgds(), steps=hs.integers(1, 20))
    def test_further_steps_of_the_operator(self, numbers: Sgd, steps: int) -> None:
        w, v = weights()
        got = predicted(numbers, Geometric(steps), w, v)
        plan = st.Plan(w, momentum_buffers=v, grads=torch.zeros_like(w))
        scale = w.abs() + v.abs() * numbers.lr * steps
        for _ in range(steps):
            plan.sgd_step_([numbers])
        close(got, w, scale)

    @pytest.mark.parametrize("steps", [1, 3, 15])
    @pytest.mark.parametrize(
        "options",
        [
            {"momentum": 0.9},
            {"momentum": 0.9, "weight_decay": 0.3},
            {"momentum": 0.9, "weight_decay": 0.3, "nesterov": True},
            {"momentum": 0.9, "weight_decay": 0.3, "dampening": 0.4},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.5, "dampening": 0.4},
        ],
        ids=str,
    )
    def test_further_steps_of_torch(self, options: dict[str, Any], steps: int) -> None:
        """Starting from a momentum of real gradients."""
        p = torch.nn.Parameter(torch.randn(30, dtype=torch.float64))
        opt = torch.optim.SGD([p], lr=0.1, **options)
        for _ in range(5):
            p.grad = torch.randn_like(p)
            opt.step()
        w, v = p.detach().clone(), opt.state[p]["momentum_buffer"].clone()
        p.grad = torch.zeros_like(p)
        for _ in range(steps):
            opt.step()
        close(predicted(Sgd(0.1, **options), Geometric(steps), w, v), p.detach(), w, v)

    @given(
        mu=hs.floats(0.01, 0.999), s=hs.floats(0, 50), lr=hs.floats(0, 1), nesterov=hs.booleans()
    )
    def test_formula(self, mu: float, s: float, lr: float, nesterov: bool) -> None:
        """Fractional steps too: W - lr*v*(mu - mu^(s+1))/(1 - mu), Nesterov's times mu."""
        w, v = weights()
        reach = (mu - mu ** (s + 1)) / (1 - mu) * (mu if nesterov else 1.0)
        law = Geometric(s)
        # Cancellation in mu - mu^(s+1) is not the operator's error: use its input.
        got = predicted(Sgd(lr, mu, nesterov=nesterov), law, w, v)
        close(got, w - lr * reach * v, w, v * lr / (1 - mu))
        same = st.predict(w, v, lr=lr, steps=law, momentum=mu, nesterov=nesterov)
        assert torch.equal(same, got)

    @given(mu=hs.floats(0.1, 0.99), a=hs.floats(0, 20), b=hs.floats(0, 20))
    def test_fractions_of_the_way_add_up(self, mu: float, a: float, b: float) -> None:
        """After a steps the momentum has the factor mu^a; b further steps equal a + b."""
        w, v = weights()
        numbers = Sgd(0.1, mu)
        half_way = predicted(numbers, Geometric(a), w, v)
        there = predicted(numbers, Geometric(b), half_way, v * mu**a)
        close(there, predicted(numbers, Geometric(a + b), w, v), w, v / (1 - mu))

    @given(s=hs.floats(0, 30))
    def test_momentum_that_does_not_decay_is_linear(self, s: float) -> None:
        w, v = weights()
        one = Sgd(0.1, 1.0)
        assert torch.equal(predicted(one, Geometric(s), w, v), predicted(one, Linear(s), w, v))

    @given(numbers=sgds(decay=True), steps=hs.integers(100, 3000))
    def test_far_ahead(self, numbers: Sgd, steps: int) -> None:
        """Thousands of updates with decay: a matrix power equals a loop."""
        w, v = weights(3)
        expected = coast(numbers, w, v, [numbers.lr] * steps)
        got = predicted(numbers, Geometric(steps), w, v)
        scale = w.abs().max() + v.abs().max() * numbers.lr / (1 - numbers.momentum)
        assert float((got - expected).abs().max()) <= 1e-11 * float(scale)

    def test_published_coefficients(self) -> None:
        """At mu = .9 the linear 3, 7, 15, 31 become 2.44, 4.70, 7.15, 8.66."""
        for s, reach in ((3, 2.44), (7, 4.70), (15, 7.15), (31, 8.66)):
            (term,) = Geometric(s).sgd(Sgd(1.0, 0.9))
            assert round(term.momentum, 2) == reach and term.keep == 1.0

    @given(numbers=sgds(decay=True), s=hs.floats(0.1, 9).filter(lambda s: s != int(s)))
    def test_weight_decay_needs_whole_steps(self, numbers: Sgd, s: float) -> None:
        with pytest.raises(ValueError, match="whole"):
            Geometric(s).sgd(numbers)

    def test_of_the_operators(self) -> None:
        """predict_, predict and stash_predict_ accept all that the law needs."""
        w, v = weights()
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "nesterov": True}
        expected = coast(Sgd(**options), w, v, [0.1] * 4)  # type: ignore[arg-type]
        law = Geometric(4)
        close(st.predict(w, v, steps=law, **options), expected, w, v)  # type: ignore[arg-type]
        moved, kept = w.clone(), torch.empty_like(w)
        st.stash_predict_(moved, kept, v, steps=law, **options)  # type: ignore[arg-type]
        assert torch.equal(kept, w)
        close(moved, expected, w, v)
        st.predict_(kept, v, steps=law, **options)  # type: ignore[arg-type]
        assert torch.equal(kept, moved)


class TestSecondOrder:
    """W - lr*[(D + lead)*v + D*(D+1)/2*(v - v_prev)], with v_prev kept by the test."""

    @given(
        numbers=sgds(),
        delay=hs.one_of(hs.integers(0, 31), hs.floats(0, 10)),
        share=hs.floats(-1, 31),
        first=hs.booleans(),
    )
    def test_definition(self, numbers: Sgd, delay: float, share: float, first: bool) -> None:
        lead = max(-delay, share)
        w, v = weights()
        g, out = torch.randn_like(w), torch.empty_like(w)
        v_prev = torch.zeros_like(v) if first else v.clone()
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
        plan.sgd_step_([numbers], first_step=first, predict=[SecondOrder(delay, lead)])
        change = delay * (delay + 1) / 2
        expected = w - numbers.lr * ((delay + lead) * v + change * (v - v_prev))
        # v - v_prev follows from the gradient by division by mu.
        close(out, expected, w, *(t * numbers.lr * (change / numbers.momentum) for t in (v, g, w)))

    def test_over_a_run(self) -> None:
        """Including the first step, for a sum, with dampening, and for an average."""
        for smoothed, dampening in ((False, 0.0), (False, 0.5), (False, 1.0), (True, 0.0)):
            w, v, out = torch.randn(20).double(), torch.zeros(20).double(), torch.zeros(20).double()
            v_prev = v.clone()
            for i in range(10):
                g = torch.randn(20).double()
                st.sgd_step_(
                    w, g, v, lr=0.1, momentum=0.9, dampening=dampening, smoothed=smoothed,
                    first_step=i == 0, predict=[(SecondOrder(3, 1), out)],
                )  # fmt: skip
                close(out, w - 0.1 * (4 * v + 6 * (v - v_prev)), w, 10 * v, 10 * g)
                v_prev = v.clone()

    def test_first_steps_of_some_tensors(self) -> None:
        """Fine where the gradient enters as on the first step, and refused elsewhere."""
        numbers: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        predict = [SecondOrder(3, 1)]
        w, v, g, out = (list(torch.randn(2, 5).double()) for _ in range(4))
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
        v_prev = v[0].clone(), torch.zeros(5).double()
        plan.sgd_step_(first_step=[False, True], predict=predict, **numbers)
        for i, before in enumerate(v_prev):
            close(out[i], w[i] - 0.1 * (4 * v[i] + 6 * (v[i] - before)), w[i], 10 * v[i], 10 * g[i])
        plan.sgd_step_(first_step=[False, False], predict=predict, dampening=0.5, **numbers)
        state = [t.clone() for t in (*w, *v, *out)]
        with pytest.raises(ValueError, match="first_step: expected the same for all tensors"):
            plan.sgd_step_(first_step=[False, True], predict=predict, dampening=0.5, **numbers)
        with pytest.raises(ValueError, match="first_step: expected the same for all tensors"):
            pairs = [(predict[0], out)]
            st.sgd_step_(w, g, v, first_step=[False, True], predict=pairs, smoothed=True, **numbers)
        assert all(map(torch.equal, state, (*w, *v, *out)))

    def test_without_delay_it_is_linear_and_needs_no_gradient(self) -> None:
        w, v = weights()
        got = st.predict(w, v, lr=0.1, steps=SecondOrder(0, 2.0), momentum=0.9)
        assert torch.equal(got, st.predict(w, v, lr=0.1, steps=2.0))

    @pytest.mark.parametrize("name", ["predict_", "predict", "stash_predict_", "predict of groups"])
    def test_only_a_step_can_write_it(self, name: str) -> None:
        w, v = weights()
        kept, out = w.clone(), w.clone()
        law = SecondOrder(2.0)
        with pytest.raises(ValueError, match="gradient"):
            if name == "predict_":
                st.predict_(w, v, lr=0.1, steps=law, momentum=0.9)
            elif name == "predict":
                st.predict(w, v, lr=0.1, steps=law, momentum=0.9, out=out)
            elif name == "stash_predict_":
                st.stash_predict_(w, kept, v, lr=0.1, steps=law, momentum=0.9)
            else:
                st.Plan(w, momentum_buffers=v).predict_([Sgd(0.1, 0.9)], steps=law)
        assert torch.equal(w, kept) and torch.equal(out, kept)

    def test_momentum_of_zero(self) -> None:
        w, v = weights()
        with pytest.raises(ValueError, match="momentum"):
            st.predict(w, v, lr=0.1, steps=SecondOrder(2.0), momentum=0.0)
