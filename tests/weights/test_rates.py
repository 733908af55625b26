"""Tests learning rates with a factor of the method, which the parameter groups never show."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.pipeline_cases import (
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from torch.optim import lr_scheduler

import spectrain_ext as st
from spectrain_ext.method import find_method


def test_a_scheduler_that_wants_a_metric():
    with pytest.raises(
        ValueError, match=r"stages\[0\] it made a ReduceLROnPlateau, whose step\(\) needs metrics"
    ):
        st.Pipeline(
            tanh_stages(2), sgd(), mse, "spectrain", scheduler=lr_scheduler.ReduceLROnPlateau
        )


def without_rates(method):
    """Return the method without its factors, and the factor of a stage and a minibatch."""
    found = find_method(method)
    return replace(found, rates=None), found.rates


def train(pipe, data):
    return [result.loss.clone() for result in pipe.run(data)]


MAKES = {
    "own": sgd(),
    "torch": torch_sgd(),
    "Muon": partial(st.optim.Muon, lr=0.02, adamw={"lr": 0.01}),
    "tensor": partial(torch.optim.Adam, lr=torch.tensor(0.05)),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_factor_is_as_good_as_other_rates(make):
    """Bit for bit; the caller may set rates between runs, and sees only them."""
    plain, factor = without_rates("auto")
    stages = tanh_stages(4)
    other = st.Pipeline(copy.deepcopy(stages), make, mse, plain, microbatches=1)
    pipe = st.Pipeline(stages, make, mse, "auto", microbatches=1)
    assert pipe.schedulers == []
    for rate in (None, 0.01):
        for place, mine, theirs in zip(pipe.places, pipe.optimizers, other.optimizers, strict=True):
            for group, twin in zip(mine.param_groups, theirs.param_groups, strict=True):
                group["lr"] = group["lr"] if rate is None else rate
                twin["lr"] = group["lr"] * factor(place, 0)
        before = [group["lr"] for each in pipe.optimizers for group in each.param_groups]
        assert factor(pipe.places[0], 0) < 1
        data = batches(8)
        assert all(map(torch.equal, train(pipe, data), train(other, data)))
        after = [group["lr"] for each in pipe.optimizers for group in each.param_groups]
        assert all(a is b for a, b in zip(after, before, strict=True))
    for p, q in zip(pipe.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("make", [sgd(), torch_sgd()])
@pytest.mark.parametrize("decay", [None, lambda o: lr_scheduler.StepLR(o, 2, 0.5)])
def test_a_factor_that_changes_counts_minibatches(make, decay):
    """Schedulers, and what they report, are those of a method without a factor."""
    method = st.pipemare(updates=7)
    plain, factor = without_rates(method)

    def by_hand(k, optimizer):
        own = 1.0 if decay is None else 0.5
        place = pipe.places[k]
        return lr_scheduler.LambdaLR(optimizer, lambda t: own ** (t // 2) * factor(place, t))

    stages, numbers = tanh_stages(3), iter(range(3))
    others = copy.deepcopy(stages)
    pipe = st.Pipeline(stages, make, mse, method, scheduler=decay)
    other = st.Pipeline(others, make, mse, plain, scheduler=lambda o: by_hand(next(numbers), o))
    for data in (batches(4), batches(3), batches(4)):
        for found, expected in zip(train(pipe, data), train(other, data), strict=True):
            close(found, expected)
    for p, q in zip(pipe.parameters(), other.parameters(), strict=True):
        close(p, q)
    rate = 0.05 if decay is None else 0.05 / 32
    assert {each.param_groups[0]["lr"] for each in pipe.optimizers} == {rate}
    assert [each.get_last_lr() for each in pipe.schedulers] == [[rate]] * 3 * (decay is not None)


def test_the_rate_comes_back_after_a_failed_step_and_hooks_may_set_it():
    rates, fails = [], []

    class Sgd(torch.optim.SGD):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            if fails:
                raise ArithmeticError
            super().step()

    def warm_up(optimizer, *_):
        optimizer.param_groups[0]["lr"] = 0.5

    pipe = st.Pipeline(tanh_stages(3), partial(Sgd, lr=0.25), mse, "auto", microbatches=1)
    factors = [without_rates("auto")[1](place, 0) for place in pipe.places]
    train(pipe, batches(2))
    assert sorted(rates) == sorted(0.25 * factor for factor in factors * 2)
    fails.append(True)
    with pytest.raises(st.StageError):
        train(pipe, batches(2))
    assert [each.param_groups[0]["lr"] for each in pipe.optimizers] == [0.25] * 3
    fails.clear()
    rates.clear()
    for each in pipe.optimizers:
        each.register_step_pre_hook(warm_up)
    train(pipe, batches(2))
    assert sorted(rates) == sorted(0.5 * factor for factor in factors * 2)
    assert [each.param_groups[0]["lr"] for each in pipe.optimizers] == [0.5] * 3
    for each in pipe.optimizers:  # outside of a run nothing is divided
        each.step()
    assert set(rates[-3:]) == {0.5}


def test_a_factor_needs_a_rate():
    make = partial(torch.optim.SGD, lr=0.1)

    def bare(params):
        made = make(params)
        made.param_groups[0]["lr"] = None
        return made

    with pytest.raises(
        ValueError, match=r"group 0 of the SGD of stages\[0\] has no 'lr' that method 'auto' could"
    ):
        st.Pipeline(tanh_stages(3), bare, mse, "auto", microbatches=1)
