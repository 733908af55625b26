"""Tests the numbers that Sgd and Adam accept, and their coefficients."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import hypothesis.strategies as hs
import numpy as np
import pytest
import torch
from hypothesis import given

from spectrain_ext.operators.numbers import Adam, Sgd, Term, fraction, non_negative, number

NAN, INF = math.nan, math.inf
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
_ADAM: dict[str, Any] = {
    "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "step": 3,
}  # fmt: skip
_NADAM = {**_ADAM, "momentum_decay": 4e-3, "mu_product": 0.2}


class TestNumber:
    """The three checks of a number."""

    @pytest.mark.parametrize(
        "value", [0, 1, 0.5, True, np.float32(0.5), np.int64(0), Fraction(1, 2)]
    )
    def test_all_kinds_of_numbers(self, value: Any) -> None:
        for check in (number, non_negative):
            assert check("x", value) == float(value)
            assert type(check("x", value)) is float
        assert number("x", torch.tensor(0.5)) == 0.5
        assert number("x", -3) == -3.0

    @pytest.mark.parametrize("value", ["1", b"1", None, [1.0], 1j, ..., torch.ones(2)], ids=repr)
    def test_no_numbers(self, value: Any) -> None:
        for check in (number, non_negative, fraction):
            with pytest.raises(TypeError, match=r"^x: expected a number"):
                check("x", value)

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    def test_not_finite(self, value: float) -> None:
        for check in (number, non_negative, fraction):
            with pytest.raises(ValueError, match=r"^x: "):
                check("x", value)

    def test_ranges(self) -> None:
        for check in (non_negative, fraction):
            with pytest.raises(ValueError, match=r"^x: .*>= 0"):
                check("x", -1e-300)
        with pytest.raises(ValueError, match=r"^x: .*\[0, 1\).*1\.0"):
            fraction("x", 1)
        assert fraction("x", math.nextafter(1, 0)) < 1 and fraction("x", 0) == 0

    def test_a_number_too_large_for_a_float(self) -> None:
        with pytest.raises(ValueError, match=r"^x: "):
            number("x", 10**400)


class TestSgd:
    """Checked numbers, and the form W' = keep*W - momentum*v' - gradient*d."""

    @pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
    @pytest.mark.parametrize("value", [-1.0, NAN, INF, -INF])
    def test_out_of_range(self, name: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"^{name}: "):
            Sgd(**{**_SGD, name: value})

    @pytest.mark.parametrize("value", [NAN, INF])
    def test_dampening(self, value: float) -> None:
        with pytest.raises(ValueError, match=r"^dampening: "):
            Sgd(0.1, 0.9, dampening=value)
        assert Sgd(0.1, 0.9, dampening=-0.5).gain == 1.5  # as in torch

    @pytest.mark.parametrize("name", ["lr", "momentum", "dampening", "weight_decay"])
    @pytest.mark.parametrize("value", ["0.1", None, [0.1]], ids=repr)
    def test_no_numbers(self, name: str, value: Any) -> None:
        with pytest.raises(TypeError, match=f"^{name}: "):
            Sgd(**{**_SGD, name: value})

    @pytest.mark.parametrize(
        "options",
        [
            {"nesterov": True, "momentum": 0.0},
            {"nesterov": True, "dampening": 0.1},
            {"smoothed": True, "momentum": 0.0},
            {"smoothed": True, "momentum": 1.0},
            {"smoothed": True, "momentum": 1.5},
            {"smoothed": True, "dampening": 0.1},
        ],
        ids=str,
    )
    def test_what_excludes_each_other(self, options: dict[str, Any]) -> None:
        name = "nesterov" if "nesterov" in options else "smoothed"
        with pytest.raises(ValueError, match=f"^{name}: "):
            Sgd(**{**_SGD, **options})

    def test_values_become_floats(self) -> None:
        made = Sgd(np.float32(0.5), torch.tensor(0.25), 0, 1)  # type: ignore[arg-type]
        values = made.lr, made.momentum, made.dampening, made.weight_decay
        assert values == (0.5, 0.25, 0.0, 1.0) and all(type(v) is float for v in values)

    def test_is_a_value(self) -> None:
        assert Sgd(0.1, 0.9) == Sgd(0.1, 0.9) and hash(Sgd(0.1, 0.9)) == hash(Sgd(0.1, 0.9))
        with pytest.raises(dataclasses.FrozenInstanceError):
            Sgd(0.1, 0.9).lr = 0.2  # type: ignore[misc]

    @given(
        lr=hs.floats(0, 1), mu=hs.floats(0.01, 0.99), wd=hs.floats(0, 1), nesterov=hs.booleans(),
        smoothed=hs.booleans(), decoupled=hs.booleans(), maximize=hs.booleans(),
        w=hs.floats(-10, 10), v=hs.floats(-10, 10), g=hs.floats(-10, 10),
    )  # fmt: skip
    def test_the_form_is_the_update(
        self, lr: float, mu: float, wd: float, nesterov: bool, smoothed: bool, decoupled: bool,
        maximize: bool, w: float, v: float, g: float,
    ) -> None:  # fmt: skip
        """Compares the coefficients with the textbook's update on one number."""
        made = Sgd(lr, mu, 0.0, wd, nesterov, maximize, decoupled, smoothed)
        sign, l2, decay, gain, decay2, eps, step = made.setting()
        assert decay2 == eps == 0.0 and step.root == 1.0
        d = sign * g + l2 * w
        buffer = decay * v + gain * d
        got = step.keep * w - step.momentum * buffer - step.gradient * d
        grad = (-g if maximize else g) + (0.0 if decoupled else wd * w)
        share = (1 - mu) * grad if smoothed else grad
        expected_v = mu * v + share
        by = share + mu * expected_v if nesterov else expected_v
        expected = w - (lr * wd * w if decoupled else 0.0) - lr * by
        assert math.isclose(buffer, expected_v, rel_tol=1e-12, abs_tol=1e-12)
        assert math.isclose(got, expected, rel_tol=1e-12, abs_tol=1e-11)

    def test_without_momentum_the_gradient_is_stepped_along(self) -> None:
        assert Sgd(0.25, 0.0).setting()[-1] == Term(1.0, 0.0, 0.25)
        step = Sgd(0.25, 0.0, weight_decay=0.5, decoupled_weight_decay=True).setting()[-1]
        assert step == Term(0.875, 0.0, 0.25)


class TestAdam:
    """Checked numbers, and torch's bias corrections."""

    @pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
    @pytest.mark.parametrize("value", [-1.0, -1e-12, NAN, INF])
    def test_out_of_range(self, name: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"^{name}: "):
            Adam(**{**_ADAM, name: value})

    @pytest.mark.parametrize("index", [0, 1])
    @pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, NAN, INF])
    def test_betas_out_of_range(self, index: int, value: float) -> None:
        betas = [0.9, 0.99]
        betas[index] = value
        with pytest.raises(ValueError, match=rf"^betas\[{index}\]: "):
            Adam(**{**_ADAM, "betas": tuple(betas)})

    @pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.999), ()], ids=str)
    def test_betas_of_another_length(self, betas: Any) -> None:
        with pytest.raises(ValueError, match=r"^betas: .*pair"):
            Adam(**{**_ADAM, "betas": betas})

    @pytest.mark.parametrize("betas", [0.9, None, "ab", ("0.9", 0.99)], ids=repr)
    def test_betas_that_are_no_numbers(self, betas: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=r"^betas"):
            Adam(**{**_ADAM, "betas": betas})

    @pytest.mark.parametrize("step", [0, -1, 0.5, 2.5, NAN, INF])
    def test_steps_that_cannot_be(self, step: float) -> None:
        with pytest.raises(ValueError, match=r"^step: "):
            Adam(**{**_ADAM, "step": step})

    @pytest.mark.parametrize("step", ["3", None, [3]], ids=repr)
    def test_steps_that_are_no_numbers(self, step: Any) -> None:
        with pytest.raises(TypeError, match=r"^step: "):
            Adam(**{**_ADAM, "step": step})

    @pytest.mark.parametrize(
        "step", [3.0, np.float32(3), np.int64(3), torch.tensor(3.0), torch.tensor(3)], ids=repr
    )
    @pytest.mark.parametrize("options", [_ADAM, _NADAM], ids=["Adam", "NAdam"])
    def test_steps_of_any_kind_are_the_same_number(self, step: Any, options: Any) -> None:
        """torch stores it in a float32 tensor; the power must not be computed in float32."""
        made = Adam(**{**options, "step": step})
        assert made == Adam(**options) and type(made.step) is int
        assert made.setting() == Adam(**options).setting()

    @pytest.mark.parametrize("value", [-0.1, NAN, INF])
    def test_momentum_decay_out_of_range(self, value: float) -> None:
        with pytest.raises(ValueError, match=r"^momentum_decay: "):
            Adam(**{**_NADAM, "momentum_decay": value})

    @pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, NAN, INF])
    def test_products_that_cannot_be(self, value: float) -> None:
        """Every mu is below 1; the default of 1 stands for Adam, which ignores it."""
        with pytest.raises(ValueError, match=r"^mu_product: "):
            Adam(**{**_NADAM, "mu_product": value})

    @pytest.mark.parametrize("name", ["momentum_decay", "mu_product", "lr", "eps", "weight_decay"])
    def test_no_numbers(self, name: str) -> None:
        with pytest.raises(TypeError, match=f"^{name}: "):
            Adam(**{**_NADAM, name: "0.1"})

    @pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6])
    def test_bias_corrections(self, step: int) -> None:
        """Compared with exact rational powers until they reach 1."""
        beta1, beta2 = Fraction(0.9), Fraction(0.999)
        made = Adam(**{**_ADAM, "step": step}).setting()[-1]
        if step > 1000:
            assert (made.momentum, made.root) == (0.1, 1.0)
            return
        assert math.isclose(made.momentum, 0.1 / float(1 - beta1**step), rel_tol=1e-14)
        assert math.isclose(made.root, float(1 - beta2**step) ** -0.5, rel_tol=1e-12)

    def test_nadam_beside_its_formulas(self) -> None:
        made = Adam(**_NADAM)
        mu = [0.9 * (1 - 0.5 * 0.96 ** (t * 4e-3)) for t in (3, 4)]
        sign, l2, decay, gain, decay2, eps, step = made.setting()
        assert (sign, l2, decay, decay2, eps) == (1.0, 0.01, 0.9, 0.999, 1e-8)
        assert math.isclose(gain, 0.1, rel_tol=1e-15)
        assert math.isclose(step.gradient, 0.1 * (1 - mu[0]) / (1 - 0.2), rel_tol=1e-14)
        assert math.isclose(step.momentum, 0.1 * mu[1] / (1 - 0.2 * mu[1]), rel_tol=1e-14)

    def test_decay(self) -> None:
        """L2 enters the direction, AdamW's decay the kept weights; never both."""
        coupled = Adam(**_ADAM).setting()
        decoupled = Adam(**_ADAM, decoupled_weight_decay=True).setting()
        assert coupled[1] == 0.01 and coupled[-1].keep == 1.0
        assert decoupled[1] == 0.0 and decoupled[-1].keep == 1.0 - 0.1 * 0.01
        assert Adam(**_ADAM, maximize=True).setting()[0] == -1.0

    def test_is_a_value(self) -> None:
        assert Adam(**_ADAM) == Adam(**{**_ADAM, "betas": [0.9, 0.999]})
        assert hash(Adam(**_ADAM)) == hash(Adam(**_ADAM))
