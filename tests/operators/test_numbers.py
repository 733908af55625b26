"""Tests the numbers that Sgd and Adam accept, and coefficients beside rational arithmetic."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from spectrain_ext import laws

NAN, INF = math.nan, math.inf
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
_ADAM: dict[str, Any] = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.01, "step": 3}
_NADAM = {**_ADAM, "momentum_decay": 4e-3, "mu_product": 0.2}
_RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Sgd": (laws.Sgd, _SGD), "Adam": (laws.Adam, _ADAM), "NAdam": (laws.Adam, _NADAM),
}  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [0, 1, 0.5, True, np.float32(0.5), np.int64(0), Fraction(1, 2), torch.tensor(0.5)],
    ids=repr,
)
def test_numbers_of_any_kind_become_floats(value: Any) -> None:
    for rule, given in _RULES.values():
        made = rule(**{**given, "lr": value, "weight_decay": value})
        assert made.lr == made.weight_decay == float(value)
        assert type(made.lr) is type(made.weight_decay) is float


#: Rule, name, values that are refused, and the message after the name.
_REFUSED: list[tuple[str, str, list[Any], str]] = [
    ("Sgd", "lr", [-1.0, -1e-300, NAN, INF, -INF, 10**400], "expected a finite number"),
    ("Sgd", "momentum", [-1.0, NAN, INF, -INF], "expected a finite number >= 0"),
    ("Sgd", "weight_decay", [-1.0, NAN, INF, -INF], "expected a finite number >= 0"),
    ("Sgd", "dampening", [NAN, INF, -INF], "expected a finite number"),
    ("Adam", "lr", [-1.0, -1e-12, NAN, INF], "expected a finite number >= 0"),
    ("Adam", "eps", [-1.0, -1e-12, NAN, INF], "expected a finite number >= 0"),
    ("Adam", "weight_decay", [-1.0, -1e-12, NAN, INF], "expected a finite number >= 0"),
    ("Adam", "step", [0, -1, 0.5, 2.5, NAN, INF], "expected a"),
    ("Adam", "betas", [(0.9,), (0.9, 0.99, 0.999), (), "abc"], "expected a pair"),
    ("NAdam", "momentum_decay", [-0.1, NAN, INF], "expected a finite number >= 0"),
    ("NAdam", "mu_product", [-0.1, 1.0, 1.5, NAN, INF], "expected a"),  # every mu is below 1
]


@pytest.mark.parametrize(("rule", "name", "values", "says"), _REFUSED)
def test_values_out_of_range(rule: str, name: str, values: list[Any], says: str) -> None:
    made, given = _RULES[rule]
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}: {says}"):
            made(**{**given, name: value})


def test_betas_lie_in_the_half_open_unit_interval() -> None:
    for value in (-0.1, 1, 1.5, NAN, INF):
        for index in (0, 1):
            betas = [0.9, 0.99]
            betas[index] = value
            with pytest.raises(ValueError, match=rf"^betas\[{index}\]: "):
                laws.Adam(**_ADAM, betas=tuple(betas))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[0, 1\).*1\.0"):
        laws.Adam(**_ADAM, betas=(1, 0.9))
    assert laws.Adam(**_ADAM, betas=(0, math.nextafter(1, 0))).betas == (0.0, math.nextafter(1, 0))


@pytest.mark.parametrize(
    "value", ["0.1", b"1", None, [0.1], 1j, ..., torch.ones(2), object()], ids=repr
)
def test_what_is_no_number(value: Any) -> None:
    names = {"Sgd": ["lr", "momentum", "dampening", "weight_decay"], "Adam": ["lr", "step", "eps"]}
    names["NAdam"] = ["momentum_decay", "mu_product"] if value is not None else []
    for rule, of_rule in names.items():
        made, given = _RULES[rule]
        for name in of_rule:
            with pytest.raises(TypeError, match=f"^{name}: expected a number"):
                made(**{**given, name: value})
    for betas in (value, (value, 0.99)):
        with pytest.raises((TypeError, ValueError), match=r"^betas"):
            laws.Adam(**_ADAM, betas=betas)


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
def test_what_excludes_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: needs"):
        laws.Sgd(**{**_SGD, **options})


def test_numbers_are_values() -> None:
    for rule, given in _RULES.values():
        made = rule(**given)
        assert made == rule(**given) and hash(made) == hash(rule(**given))
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.lr = 0.2
    assert laws.Adam(**_ADAM, betas=[0.9, 0.999]) == laws.Adam(**_ADAM)  # type: ignore[arg-type]
    assert laws.Sgd(0.1, 0.9, dampening=-0.5).gain == 1.5  # as in torch


@pytest.mark.parametrize(
    "step", [3.0, np.float32(3), np.int64(3), torch.tensor(3.0), torch.tensor(3)], ids=repr
)
@pytest.mark.parametrize("options", [_ADAM, _NADAM], ids=["Adam", "NAdam"])
def test_steps_of_any_kind_are_the_same_number(step: Any, options: Any) -> None:
    """torch stores it in a float32 tensor; the power must not be computed in float32."""
    made = laws.Adam(**{**options, "step": step})
    assert made == laws.Adam(**options) and type(made.step) is int
    assert made.term() == laws.Adam(**options).term()


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6])
def test_bias_corrections(step: int) -> None:
    """Compared with exact rational powers until they reach 1."""
    beta1, beta2 = Fraction(0.9), Fraction(0.999)
    made = laws.Adam(**{**_ADAM, "step": step}).term()
    if step > 1000:
        assert (made.momentum, made.root) == (0.1, 1.0)
        return
    assert math.isclose(made.momentum, 0.1 / float(1 - beta1**step), rel_tol=1e-14)
    assert math.isclose(made.root, float(1 - beta2**step) ** -0.5, rel_tol=1e-12)
