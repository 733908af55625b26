"""Tests the numbers that Sgd and Adam accept, also in memory."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bad_input import raises
from helpers.ops_calls import Rate, StepCount, in_memory
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws

INF = math.inf
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
_ADAM: dict[str, Any] = {"lr": 0.1, "step": 3}
_RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Sgd": (laws.SgdNumbers, _SGD),
    "Adam": (laws.AdamNumbers, _ADAM),
    "NAdam": (laws.AdamNumbers, {**_ADAM, "momentum_decay": 4e-3, "mu_product": 0.2}),
}


@pytest.mark.parametrize(
    "value", [0, 0.5, True, np.float32(0.5), np.int64(0), Fraction(1, 2), torch.tensor(0.5)]
)
def test_numbers_of_any_kind_become_floats(value: Any) -> None:
    names = ("lr", "momentum", "dampening", "weight_decay", "eps", "momentum_decay")
    sgd = laws.SgdNumbers(value, value, dampening=value, weight_decay=value)
    numbers = {"eps": value, "weight_decay": value, "momentum_decay": value}
    adam = laws.AdamNumbers(value, step=1, mu_product=0.5, **numbers)
    for made in (sgd, adam):
        fields = [getattr(made, name) for name in names if hasattr(made, name)]
        assert fields == [float(value)] * 4 and {type(field) for field in fields} == {float}


@pytest.mark.parametrize("options", [{}, {"momentum_decay": 4e-3, "mu_product": 0.2}])
def test_a_step_of_any_kind_is_a_whole_number(options: dict[str, float]) -> None:
    """torch stores it in a float32 tensor; the power must not be computed in float32."""
    made = laws.AdamNumbers(lr=0.1, step=torch.tensor(3.0), **options)  # type: ignore[arg-type]
    assert made == laws.AdamNumbers(lr=0.1, step=3, **options) and type(made.step) is int
    assert made.term() == laws.AdamNumbers(lr=0.1, step=3, **options).term()


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
    made, numbers = _RULES[rule]
    with pytest.raises(ValueError, match=f"^{name}: {says}"):
        made(**{**numbers, name: value})


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
        laws.SgdNumbers(**{**_SGD, **options})


def test_numbers_are_values() -> None:
    for rule, numbers in _RULES.values():
        made = rule(**numbers)
        assert made == rule(**numbers) and hash(made) == hash(rule(**numbers))
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.lr = 0.2
    assert laws.AdamNumbers(**_ADAM, betas=[0.9, 0.999]) == laws.AdamNumbers(**_ADAM)  # type: ignore[arg-type]
    assert laws.SgdNumbers(0.1, 0.9, dampening=-0.5).gain == 1.5  # as in torch


# Learning rates that kernels read from memory.


def tensors(n: int) -> list[list[Tensor]]:
    """Return W and n lists of two tensors; float64 shows a coefficient's bits."""
    return [[torch.randn(9).double(), torch.randn(4, 3).double()] for _ in range(n + 1)]


@given(lr=some.floats(1e-6, 1.0), mu=some.floats(0.05, 0.999), steps=some.floats(0.25, 40.0))
def test_a_law_that_multiplies_twice(lr: float, mu: float, steps: float) -> None:
    """In another order, so that the last bit of a double may differ."""
    w, v = tensors(1)
    numbers = {"momentum": mu, "nesterov": True, "steps": laws.Geometric(steps)}
    read = st.predict(w, v, lr=in_memory(lr), **numbers)
    torch.testing.assert_close(read, st.predict(w, v, lr=lr, **numbers), rtol=1e-14, atol=1e-13)


def test_a_tensor_on_the_cpu_is_read_at_once() -> None:
    w, v, out = tensors(2)
    st.predict(w, v, lr=torch.tensor(0.5), steps=torch.tensor([2.0]), out=out)  # type: ignore[arg-type]
    assert all(map(torch.equal, out, st.predict(w, v, lr=0.5, steps=2)))
    assert type(laws.SgdNumbers(torch.tensor(0.5), 0.9).lr) is float  # type: ignore[arg-type]
    assert type(laws.AdamNumbers(torch.tensor(0.5), step=1).lr) is float  # type: ignore[arg-type]


def _without_storage() -> Tensor:
    lr = torch.tensor(0.5)
    lr.untyped_storage().resize_(0)
    return lr


_DECAYED = {"momentum": 0.9, "weight_decay": 0.1}
_FAR = laws.Geometric(3)
_ON_HOST = "^lr: expected a number on the host, since this prediction is not linear in it"


@pytest.mark.parametrize(
    ("lr", "numbers", "error", "says"),
    [
        (Rate(torch.zeros(2)), {}, ValueError, "^lr: expected one element of float32 or float64"),
        (Rate(torch.zeros(1).half()), {}, ValueError, "^lr: expected one element of .*16"),
        (Rate(torch.zeros(1).long()), {}, TypeError, "^lr: expected float.*, got int64"),
        (Rate(torch.zeros(1, device="meta")), {}, TypeError, "^lr: expected a dense tensor on a"),
        (Rate(_without_storage()), {}, TypeError, "^lr: has no memory of its own"),
        (0.1, {"momentum": in_memory(0.5)}, TypeError, "^momentum: expected a number, got .*Rate"),
        (in_memory(0.1), {"steps": laws.SecondOrder(2.0), "momentum": 0.9}, ValueError, "second-"),
        (in_memory(0.5), {"steps": _FAR, **_DECAYED, "nesterov": True}, TypeError, _ON_HOST),
    ],
)
def test_a_rate_that_cannot_be(
    lr: Any, numbers: dict[str, Any], error: type[Exception], says: str
) -> None:
    w, v = lists = tensors(1)
    raises(error, says, lambda: st.predict_(w, v, lr=lr, **{"steps": 2, **numbers}), lists)


def test_a_plans_steps_may_be_counted_on_the_host_and_in_memory_in_turn() -> None:
    """The plan remembers numbers that came twice; a count in memory is never read on the host."""
    w, g, m, u = (torch.rand(9) for _ in range(4))
    others = [t.clone() for t in (w, g, m, u)]
    plan, other = (
        st.Plan(a, grads=b, exp_avgs=c, exp_avg_sqs=d) for a, b, c, d in ((w, g, m, u), others)
    )
    for step in range(1, 7):
        other.adam_step_(lr=0.1, step=step)
        count = StepCount(torch.tensor([float(step)])) if step in (4, 6) else step
        plan.adam_step_(lr=0.1, step=count)
    assert torch.equal(w, others[0])


def test_what_is_not_linear_takes_its_rate_from_the_host() -> None:
    with pytest.raises(ValueError, match=r"^momentum_decay: NAdam needs learning rate and step"):
        laws.AdamNumbers(in_memory(0.5), step=1, momentum_decay=4e-3)
    w, v = lists = tensors(1)
    plan, decoupled = st.Plan(w, momentum_buffers=v), {"decoupled_weight_decay": True, **_DECAYED}
    call = partial(plan.predict_, lr=in_memory(0.5), **decoupled, steps=_FAR)
    raises(TypeError, _ON_HOST, call, lists)


def test_an_optimizer_hands_it_on() -> None:
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2))
    rate = torch.tensor(0.5)
    ours = st.optim.SGD([p], lr=0.5, momentum=0.9)
    plain = st.optim.SGD([q], lr=0.5, momentum=0.9)
    ours.param_groups[0]["lr"] = Rate(rate)
    for value in (0.5, 0.25):
        rate.fill_(value)
        plain.param_groups[0]["lr"] = value
        for parameter, optimizer in ((p, ours), (q, plain)):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert torch.equal(p, q)
