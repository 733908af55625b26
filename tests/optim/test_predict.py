"""Tests predictions in place: predict_, restore_ and predicted."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers.interrupting import Interrupts
from helpers.optim_cases import (
    assert_bits,
    bits,
    give_gradients,
    trained,
)
from torch import nn

import spectrain_ext as st


@pytest.mark.parametrize("steps", [0, st.laws.Geometric(0), (0,)], ids=str)
def test_where_nothing_is_predicted_no_pass_is_made(steps: st.laws.Horizons) -> None:
    """Nothing is restored either: a graph of the weights survives the block."""
    params, optimizer = trained(dtype=torch.float32)
    with optimizer.predicted(steps):
        loss = torch.stack([(p * p).sum() for p in params]).sum()
        inside = [p._version for p in params]
    assert [p._version for p in params] == inside
    loss.backward()


@pytest.mark.parametrize("ends", ["left", "raised"])
def test_a_model_is_not_saved_while_its_weights_are_predicted(ends: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = st.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    kept = bits(model.parameters())
    saves = (
        lambda: model.state_dict(),
        lambda: model[2].state_dict(),
        lambda: torch.save(model, io.BytesIO()),
        lambda: copy.deepcopy(model),
    )
    with suppress(ZeroDivisionError), optimizer.predicted(2):
        for save in saves:
            with pytest.raises(RuntimeError, match="leave the block of predicted"):
                save()
        assert model[0].weight.detach().sum() == model[0].weight.sum()
        if ends == "raised":
            raise ZeroDivisionError
    assert_bits(model.parameters(), kept)
    for save in saves:
        save()
    assert all(not vars(p) for p in model.parameters())


def test_weights_that_were_predicted_are_not_kept_alive() -> None:
    model = nn.Linear(4, 2)
    optimizer = st.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    with optimizer.predicted(2):
        model(torch.randn(3, 4)).sum().backward()
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_a_backward_across_predict_or_restore_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    before = model(torch.randn(3, 4)).sum()
    with optimizer.predicted(1):
        inside = model(torch.randn(3, 4)).sum()
        with pytest.raises(RuntimeError, match="inplace"):
            before.backward()
    with pytest.raises(RuntimeError, match="inplace"):
        inside.backward()


def test_restore_reaches_parameters_that_moved_meanwhile() -> None:
    params, optimizer = trained()
    kept = bits(params)
    optimizer.predict_(2)
    for p in params:
        p.data = p.data.clone()
    optimizer.restore_()
    assert_bits(params, kept)


def _interrupted_at(n: int, work: Callable[[], None]) -> bool:
    """Run work; raise KeyboardInterrupt at the n-th line inside the package, counted from 0."""
    try:
        with Interrupts(n):
            work()
    except KeyboardInterrupt:
        return True
    return False


def _is_predicted(optimizer: Any) -> bool:
    try:
        copy.deepcopy(optimizer)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("twice", [False, True])
def test_an_interrupt_at_any_line_leaves_the_true_weights_or_says_so(twice: bool) -> None:
    params = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3).double())]
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    give_gradients(params)
    optimizer.step()
    true = bits(params)

    def work() -> None:
        with optimizer.predicted(2.0):
            pass

    n = 0
    while _interrupted_at(n, work):
        for m in (1, 5, 10, 20) if twice else ():
            if _is_predicted(optimizer):
                _interrupted_at(m, optimizer.restore_)
        if _is_predicted(optimizer):
            with pytest.raises(RuntimeError, match="restore_"):
                optimizer.step()
            optimizer.restore_()
        assert_bits(params, true)
        n += 1
    assert_bits(params, true)
    assert n > 50
