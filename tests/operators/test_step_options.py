"""Tests a step's scalars in memory, zero_grad and seed: which arrays are taken, and errors.

Their bits are in test_calls.py, graphs in test_cuda_rates.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bad_input import raises
from torch import Tensor

import spectrain_ext as st

Lists = list[list[Tensor]]
SIZES = (1, 7, 1025)


def _lists() -> Lists:
    """W, g, two positive moments and an output."""
    return [[(torch.rand if j in (2, 3) else torch.randn)(k) for k in SIZES] for j in range(5)]


def _operator(x: Lists, **more: Any) -> None:
    st.adam_step_(*x[:4], lr=0.1, step=3, predict=[(2.0, x[4])], **more)


def _by_plan(x: Lists, **more: Any) -> None:
    plan = st.Plan(x[0], exp_avgs=x[2], exp_avg_sqs=x[3], grads=x[1], outs=[x[4]])
    plan.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0], **more)


_STEPS: dict[str, Callable[..., None]] = {"operator": _operator, "plan": _by_plan}
every_step = pytest.mark.parametrize("name", _STEPS)


@pytest.mark.parametrize("make", [lambda a: a[:1], lambda a: a.reshape(1, 1), torch.from_numpy])
def test_any_array_of_one_element(make: Callable[[Any], Any]) -> None:
    source = np.full((1,), 2.0, np.float32)
    w, g, v = (np.ones(5, np.float32) for _ in range(3))
    st.sgd_step_(w, g, v, lr=1.0, momentum=0.5, grad_scale=make(source))
    assert (v == 1.0).all() and (w == 0.0).all() and source[0] == 2.0


_NAMES = ("grad_scale", "found_inf", "clip_factor")
_IN_WORDS = "expected one element of float32, got"
_BOOL = r"expected .*got bool; .* one element of float32 on cpu: torch\.tensor\(1"


@pytest.mark.parametrize(
    ("value", "names", "error", "says"),
    [
        (torch.ones(1).double(), _NAMES, ValueError, f"{_IN_WORDS} float64"),
        (torch.ones(2), _NAMES, ValueError, rf"{_IN_WORDS} float32 of shape \(2,\)"),
        (torch.ones(0), _NAMES, ValueError, rf"{_IN_WORDS} float32 of shape \(0,\)"),
        (np.ones(1, np.float16), _NAMES, ValueError, f"{_IN_WORDS} float16"),
        (True, ["found_inf"], TypeError, _BOOL),
        (torch.tensor(True), ["found_inf"], TypeError, _BOOL),
        (2.0, ["clip_factor"], TypeError, "expected"),
        ("2", ["clip_factor"], TypeError, "expected"),
        (torch.ones(1).int(), ["clip_factor"], TypeError, "expected"),
        (torch.ones((), device="meta"), ["found_inf"], (TypeError, ValueError), ""),
    ],
)
@every_step
def test_a_scalar_that_cannot_be(
    name: str, value: Any, names: list[str], error: type[Exception], says: str
) -> None:
    x = _lists()
    for argument in names:
        raises(error, f"^{argument}: {says}", lambda a=argument: _STEPS[name](x, **{a: value}), x)


@every_step
def test_a_scalar_in_memory_that_the_step_writes(name: str) -> None:
    x = _lists()
    for options, says in (
        ({"grad_scale": x[0][0]}, "^grad_scale: expected memory .* overlap with params"),
        ({"clip_factor": x[1][0], "zero_grad": True}, r"^clip_factor: .*overlap with grads\[0\]"),
    ):
        raises(ValueError, says, lambda more=options: _STEPS[name](x, **more), x)


@every_step
def test_gradients_that_share_memory_cannot_be_set_to_zero(name: str) -> None:
    x = _lists()
    x[1][1] = x[1][2][:7]
    says = r"grads\[2\]: is set to zero.*overlap with grads\[1\]"
    raises(ValueError, says, lambda: _STEPS[name](x, zero_grad=True), x)
    _STEPS[name](x)


def test_other_gradients_are_looked_at_again() -> None:
    w, shared = [torch.ones(3), torch.ones(3)], torch.ones(4)
    plan = st.Plan(w, grads=[torch.ones(3), torch.ones(3)])
    step = partial(plan.sgd_step_, lr=0.1, momentum=0.0, zero_grad=True)
    step()
    plan.refresh([shared[:3], shared[1:]])
    raises(ValueError, r"grads\[1\]: is set to zero", step, (w, shared))


def test_a_read_only_gradient_cannot_be_set_to_zero() -> None:
    w, g, v = (np.ones(5, np.float32) for _ in range(3))
    g.flags.writeable = False
    step = {"lr": 0.1, "momentum": 0.9, "zero_grad": True}
    plan = st.Plan(w, momentum_buffers=v, grads=g)
    for call in (partial(plan.sgd_step_, **step), partial(st.sgd_step_, w, g, v, **step)):
        with pytest.raises(ValueError, match="grads: expected a writable array, got"):
            call()
        assert (w == 1).all() and (v == 1).all()
    plan.sgd_step_(lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("seed", "error", "says"),
    [
        (1.0, TypeError, "rounding_seed: expected an int or None"),
        (True, TypeError, "rounding_seed: expected an int or None"),
        (2**64, ValueError, "rounding_seed: expected an int of 64 bits"),
        (-(2**63) - 1, ValueError, "rounding_seed: expected an int of 64 bits"),
        (1, ValueError, r"rounding_seed: expected bfloat16 weights.*got float32 in params\[1\]"),
    ],
)
def test_a_seed_that_cannot_be(seed: Any, error: type[Exception], says: str) -> None:
    w, g, v, u = lists = [[torch.ones(3).bfloat16(), torch.ones(3)] for _ in range(4)]
    plan = st.Plan(w, exp_avgs=v, exp_avg_sqs=u, grads=g)
    sgd, adam = {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "step": 1}
    for call in (
        lambda: st.sgd_step_(w, g, v, rounding_seed=seed, **sgd),
        lambda: st.adam_step_(w, g, v, u, rounding_seed=seed, **adam),
        lambda: plan.sgd_step_(rounding_seed=seed, **sgd),
        lambda: plan.adam_step_(rounding_seed=seed, **adam),
    ):
        raises(error, says, call, lists)
