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

INF = math.inf
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
_ADAM: dict[str, Any] = {"lr": 0.1, "step": 3}
_RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Sgd": (laws.Sgd, _SGD),
    "Adam": (laws.Adam, _ADAM),
    "NAdam": (laws.Adam, {**_ADAM, "momentum_decay": 4e-3, "mu_product": 0.2}),
}


@pytest.mark.parametrize(
    "value", [0, 0.5, True, np.float32(0.5), np.int64(0), Fraction(1, 2), torch.tensor(0.5)]
)
def test_numbers_of_any_kind_become_floats(value: Any) -> None:
    names = ("lr", "momentum", "dampening", "weight_decay", "eps", "momentum_decay")
    sgd = laws.Sgd(value, value, dampening=value, weight_decay=value)
    numbers = {"eps": value, "weight_decay": value, "momentum_decay": value}
    adam = laws.Adam(value, step=1, mu_product=0.5, **numbers)
    for made in (sgd, adam):
        fields = [getattr(made, name) for name in names if hasattr(made, name)]
        assert fields == [float(value)] * 4 and {type(field) for field in fields} == {float}


@pytest.mark.parametrize("options", [{}, {"momentum_decay": 4e-3, "mu_product": 0.2}])
def test_a_step_of_any_kind_is_a_whole_number(options: dict[str, float]) -> None:
    """torch stores it in a float32 tensor; the power must not be computed in float32."""
    made = laws.Adam(lr=0.1, step=torch.tensor(3.0), **options)  # type: ignore[arg-type]
    assert made == laws.Adam(lr=0.1, step=3, **options) and type(made.step) is int
    assert made.term() == laws.Adam(lr=0.1, step=3, **options).term()


@pytest.mark.parametrize(
    ("rule", "name", "value", "says"),
    [
        ("Sgd", "lr", 10**400, "expected a finite number"),
        ("Sgd", "lr", INF, "expected a finite number >= 0"),
        ("Sgd", "momentum", INF, "expected a finite number >= 0"),
        ("Sgd", "dampening", -INF, "expected a finite number"),
        ("Adam", "weight_decay", INF, "expected a finite number >= 0"),
        ("Adam", "step", INF, "expected a finite number"),
        ("NAdam", "mu_product", 1.0, r"expected a number in \[0, 1\), got 1\.0"),
    ],
)
def test_a_number_out_of_range(rule: str, name: str, value: float, says: str) -> None:
    """More of them, given to operators, are in test_bad_numbers.py."""
    made, given = _RULES[rule]
    with pytest.raises(ValueError, match=f"^{name}: {says}"):
        made(**{**given, name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": True, "momentum": 0.0},
        {"nesterov": True, "dampening": 0.1},
        {"smoothed": True, "momentum": 0.0},
        {"smoothed": True, "momentum": 1.0},
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
