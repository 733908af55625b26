"""Tests optim.SGD's extras: smoothed gradients and decoupled weight decay."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers.optim_cases import assert_same, bits, give_gradients, make_params, momenta, twins

import spectrain_ext as st

OPTIONS = [
    {
        "smoothed": smoothed,
        "decoupled_weight_decay": decoupled,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    for smoothed, decoupled, nesterov, maximize in itertools.product((False, True), repeat=4)
]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_steps_match_the_formulas(options: dict[str, Any], dtype: torch.dtype) -> None:
    params = make_params(dtype)
    optimizer = st.optim.SGD(params, lr=0.05, momentum=0.8, weight_decay=0.1, **options)
    weights = [p.detach().double() for p in params]
    momentum: list[torch.Tensor | None] = [None] * len(params)
    for step in range(20):
        give_gradients(params, none=[5] if step < 4 else [0] if step % 3 == 0 else [])
        for i, p in enumerate(params):
            if p.grad is None:
                continue
            w, g = weights[i], p.grad.double() * (-1 if options["maximize"] else 1)
            if options["decoupled_weight_decay"]:
                w = w * (1 - 0.05 * 0.1)
            else:
                g = g + 0.1 * w
            gain = 0.2 if options["smoothed"] else 1.0
            v = momentum[i]
            v = gain * g if v is None else 0.8 * v + gain * g
            momentum[i] = v
            weights[i] = w - 0.05 * (gain * g + 0.8 * v if options["nesterov"] else v)
        optimizer.step()
    assert_same(params, [w.to(dtype) for w in weights])
    found = [v for v in momenta(optimizer, params) if v is not None]
    assert_same(found, [v.to(dtype) for v in momentum if v is not None])


def test_an_average_is_a_sum_at_another_learning_rate() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.5, momentum=0.9, smoothed=True)
    reference = torch.optim.SGD(theirs, lr=0.05, momentum=0.9)
    for _ in range(10):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_groups_may_differ_in_the_extras() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(
        [{"params": ours[:3], "smoothed": True, "lr": 0.5}, {"params": ours[3:]}],
        lr=0.1,
        momentum=0.9,
    )
    reference = torch.optim.SGD(
        [{"params": theirs[:3], "lr": 0.05}, {"params": theirs[3:]}], lr=0.1, momentum=0.9
    )
    for _ in range(5):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert len(next(iter(optimizer._launches._known.values())).launches) == 1


def test_the_extras_are_keys_of_the_groups_only_where_asked_for() -> None:
    plain = st.optim.SGD(make_params(), lr=0.1, momentum=0.9)
    extra = st.optim.SGD(make_params(), lr=0.1, momentum=0.9, smoothed=True)
    assert "smoothed" not in plain.param_groups[0]
    assert extra.param_groups[0]["smoothed"] is True
    extra.add_param_group({"params": make_params()})
    assert extra.param_groups[1]["smoothed"] is True
    assert copy.deepcopy(extra).param_groups[0]["smoothed"] is True


def test_a_checkpoint_of_torchs_sgd_keeps_the_extras_of_the_optimizer() -> None:
    theirs = make_params()
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    give_gradients(theirs)
    reference.step()
    ours = twins(theirs)
    optimizer = st.optim.SGD(ours, momentum=0.5, smoothed=True)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["smoothed"] is True
    assert optimizer.param_groups[0]["momentum"] == 0.9
    kept, before = bits(momenta(optimizer, ours)), bits(ours)
    give_gradients(ours)
    optimizer.step()
    for p, w, v in zip(ours, before, kept, strict=True):
        wanted = w - 0.1 * (0.9 * v + 0.1 * p.grad)
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-12, atol=1e-13)
    # and torch's loads this one's
    reference.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "options",
    (
        {"smoothed": True},
        {"smoothed": True, "momentum": 1.0},
        {"smoothed": True, "momentum": 0.9, "dampening": 0.1},
    ),
    ids=str,
)
def test_an_average_needs_a_momentum_below_one_and_no_dampening(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="group 0: smoothed"):
        st.optim.SGD(make_params(), lr=0.1, **options)


def test_groups_that_differ_in_having_momentum_take_a_launch_each() -> None:
    params = [p for p in make_params() if p.numel()]
    optimizer = st.optim.SGD(
        [{"params": params[:2], "momentum": 0.0}, {"params": params[2:4]}, {"params": params[4:]}],
        lr=0.1,
        momentum=0.9,
    )
    kept = bits(params)
    give_gradients(params)
    optimizer.step()
    assert not any(torch.equal(p, k) for p, k in zip(params, kept, strict=True))
    rows = next(iter(optimizer._launches._known.values())).launches
    assert [len(each.params) for each in rows] == [2, 3]
    assert [each.native.last_launch()[0] for each in rows] == [1, 1]
    assert not any(p in optimizer.state for p in params[:2])
