"""Tests learning rates with a factor of the method, which the parameter groups never show.

Factors that change, with schedulers, are in oracle/cases.py.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages, torch_sgd  # noqa: F401

import spectrain_ext as st
from spectrain_ext.method import find_method

AUTO = find_method("auto")


def made(stages, make, method, **more):
    return st.Pipeline(copy.deepcopy(stages), make, mse, method, microbatches=1, **more)


def rates(pipe):
    return [group["lr"] for each in pipe.optimizers for group in each.param_groups]


@pytest.mark.parametrize(
    "make",
    [
        sgd(),
        torch_sgd(),
        partial(st.optim.Muon, lr=0.02, adamw={"lr": 0.01}),
        partial(torch.optim.Adam, lr=torch.tensor(0.05)),
    ],
    ids=["own", "torch", "Muon", "tensor"],
)
def test_a_factor_is_as_good_as_other_rates(make):
    """Bit for bit; the caller may set rates between runs, and sees only them."""
    plain, factor = replace(AUTO, rates=None), AUTO.rates
    stages = tanh_stages(4)
    other, pipe = made(stages, make, plain), made(stages, make, "auto")
    assert pipe.schedulers == []
    for rate in (None, 0.01):
        for place, mine, theirs in zip(pipe.places, pipe.optimizers, other.optimizers, strict=True):
            for group, twin in zip(mine.param_groups, theirs.param_groups, strict=True):
                group["lr"] = group["lr"] if rate is None else rate
                twin["lr"] = group["lr"] * factor(place, 0)
        before, data = rates(pipe), batches(8)
        assert factor(pipe.places[0], 0) < 1
        assert all(map(torch.equal, losses(pipe, data), losses(other, data)))
        assert all(a is b for a, b in zip(rates(pipe), before, strict=True))
    assert all(map(torch.equal, pipe.parameters(), other.parameters()))


def test_the_rate_comes_back_after_a_failed_step_and_hooks_may_set_it():
    seen, fails = [], []

    class Sgd(torch.optim.SGD):
        def step(self):
            seen.append(self.param_groups[0]["lr"])
            if fails:
                raise ArithmeticError
            super().step()

    def warm_up(optimizer, *_):
        optimizer.param_groups[0]["lr"] = 0.5

    pipe = made(tanh_stages(3), partial(Sgd, lr=0.25), "auto")
    factors = [AUTO.rates(place, 0) for place in pipe.places]
    losses(pipe, batches(2))
    assert sorted(seen) == sorted(0.25 * factor for factor in factors * 2)
    fails.append(True)
    with pytest.raises(st.StageError):
        losses(pipe, batches(2))
    assert rates(pipe) == [0.25] * 3
    fails.clear()
    seen.clear()
    for each in pipe.optimizers:
        each.register_step_pre_hook(warm_up)
    losses(pipe, batches(2))
    assert sorted(seen) == sorted(0.5 * factor for factor in factors * 2)
    assert rates(pipe) == [0.5] * 3
    for each in pipe.optimizers:  # outside of a run nothing is divided
        each.step()
    assert set(seen[-3:]) == {0.5}


def test_a_factor_needs_a_rate():
    def bare(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.param_groups[0]["lr"] = None
        return optimizer

    with pytest.raises(ValueError, match=r"group 0 of the SGD of stages\[0\] has no 'lr'"):
        made(tanh_stages(3), bare, "auto")
