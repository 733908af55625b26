"""Tests learning rates with a factor."""

from __future__ import annotations

import pytest
import torch
from helpers.pipeline_cases import (
    float64,  # noqa: F401  # a fixture
    mse,
    sgd,
    tanh_stages,
)
from torch.optim import lr_scheduler

import spectrain_ext as st
from spectrain_ext.optim import SGD
from spectrain_ext.weights.rates import PacedRates


def test_a_scheduler_that_wants_a_metric():
    with pytest.raises(
        ValueError, match=r"stages\[0\] it made a ReduceLROnPlateau, whose step\(\) needs metrics"
    ):
        st.Pipeline(
            tanh_stages(2), sgd(), mse, "spectrain", scheduler=lr_scheduler.ReduceLROnPlateau
        )


# T1: a factor on a stage's rates


def paced(lr=1.0, factory=None, factor=lambda t: 1 / (4 - min(t, 3)), groups=1):
    opt = SGD([{"params": [torch.zeros(1)], "lr": lr / (g + 1)} for g in range(groups)], lr=lr)
    return opt, PacedRates(opt, factor, None if factory is None else factory(opt))


@pytest.mark.parametrize(
    "factory",
    [
        None,
        lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
        lambda opt: lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
        lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=7),
        lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, 40, cycle_momentum=False),
    ],
    ids=["none", "exponential", "steps", "cosine", "one cycle"],
)
def test_a_factor_leaves_the_schedulers_own_rates_alone(factory):
    opt, pace = paced(factory=factory, groups=2)
    other, _ = paced(factor=lambda t: 1.0, groups=2)
    plain = None if factory is None else factory(other)
    for t in range(8):
        expected = [group["lr"] / (4 - min(t, 3)) for group in other.param_groups]
        assert [group["lr"] for group in opt.param_groups] == pytest.approx(expected, rel=1e-15)
        assert pace.get_last_lr() == [group["lr"] for group in opt.param_groups]
        opt.step()
        other.step()
        pace.step()
        if plain is not None:
            plain.step()
    if plain is not None:
        assert pace.last_epoch == plain.last_epoch == 8
        assert {**pace.state_dict(), **plain.state_dict()} == pace.state_dict()
    with pytest.raises(AttributeError):
        pace.no_such_thing  # noqa: B018


def test_a_rate_in_a_tensor_stays_there():
    lr = torch.tensor(1.0)
    opt = torch.optim.SGD([torch.zeros(1)], lr=lr)
    pace = PacedRates(opt, lambda t: 0.5 if t == 0 else 1.0, None)
    assert opt.param_groups[0]["lr"].item() == 0.5
    pace.step()
    assert opt.param_groups[0]["lr"].item() == 1.0
    assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)


def test_a_rate_that_somebody_sets_is_the_present_one():
    opt, pace = paced()
    pace.step()
    opt.param_groups[0]["lr"] = 0.5
    pace.step()  # from 1/3 of one and a half to a half of it
    assert opt.param_groups[0]["lr"] == pytest.approx(0.75)
    pace.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(1.5)


def test_what_is_set_is_the_schedulers():
    opt, pace = paced(factory=lambda opt: lr_scheduler.LambdaLR(opt, lambda t: 1 / (t + 1)))
    pace.base_lrs = [8.0]
    pace.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(8.0 / 2 / 3)


def test_its_state_goes_on_in_another_one():
    def factory(opt):
        return lr_scheduler.ExponentialLR(opt, 0.9)

    opt, pace = paced(factory=factory)
    for _ in range(2):
        pace.step()
    other, loaded = paced(lr=7.0, factory=factory)
    loaded.load_state_dict(pace.state_dict())
    for _ in range(3):
        assert other.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
        pace.step()
        loaded.step()
    begun, _ = paced()
    plain = lr_scheduler.ExponentialLR(begun, 0.9)
    _, later = paced(factory=factory)
    later.load_state_dict(plain.state_dict())  # from a run without a factor
    assert later.state_dict()["paced_updates"] == 0
