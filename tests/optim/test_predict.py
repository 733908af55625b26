"""Tests predictions in place: predict_, restore_ and predicted."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from helpers.interrupting import Interrupts
from helpers.optim_cases import (
    DTYPES,
    TOLERANCE,
    assert_bits,
    assert_same,
    bits,
    give_gradients,
    make_params,
    momenta,
    trained,
)
from torch import nn

import spectrain_ext as st


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", (0, 1, 2.5))
def test_predict_and_restore(dtype: torch.dtype, steps: float) -> None:
    params, optimizer = trained(dtype)
    kept = bits(params)
    optimizer.predict_(steps)
    for p, w, v in zip(params, kept, momenta(optimizer, params), strict=True):
        exact = w.double() - 0.1 * steps * v.double()
        torch.testing.assert_close(p.detach().double(), exact, **TOLERANCE[dtype])
        if steps == 0:
            assert torch.equal(p.detach(), w)
    optimizer.restore_()
    assert_bits(params, kept)


@pytest.mark.parametrize("steps", [0, st.laws.Geometric(0), (0,)], ids=str)
def test_where_nothing_is_predicted_no_pass_is_made(steps: st.laws.Horizons) -> None:
    """Nothing is restored either: a graph of the weights survives the block."""
    params, optimizer = trained(torch.float32)
    with optimizer.predicted(steps):
        loss = torch.stack([(p * p).sum() for p in params]).sum()
        inside = [p._version for p in params]
    assert [p._version for p in params] == inside
    loss.backward()


def test_prediction_uses_each_groups_current_learning_rate() -> None:
    params = make_params()
    optimizer = st.optim.SGD(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.1, momentum=0.9
    )
    give_gradients(params)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.03, dtype=torch.float64)
    kept = bits(params)
    with optimizer.predicted(3):
        for row, (p, w) in enumerate(zip(params, kept, strict=True)):
            v = optimizer.state[p]["momentum_buffer"]
            lr = 0.03 if row < 2 else 0.5
            torch.testing.assert_close(p.detach(), w - lr * 3 * v, rtol=1e-13, atol=1e-15)
    assert_bits(params, kept)


def test_without_momentum_yet_the_prediction_is_the_weights() -> None:
    params = make_params()
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    kept = bits(params)
    with optimizer.predicted(4.0):
        assert_bits(params, kept)
    give_gradients(params, none=[0, 4])
    optimizer.step()
    kept = bits(params)
    with optimizer.predicted(4.0):
        same = [torch.equal(p.detach(), k) for p, k in zip(params, kept, strict=True)]
        assert same == [True, False, True, False, True, False]
    assert_bits(params, kept)


def test_gradients_inside_the_context_are_those_at_the_predicted_weights() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    params = list(model.parameters())
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5).double()).square().mean().backward()
        optimizer.step()
    kept = bits(params)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(params, twin.parameters(), strict=True):
            q.sub_(optimizer.state[p]["momentum_buffer"], alpha=0.1 * 2)
    x = torch.randn(4, 5).double()
    optimizer.zero_grad()
    with optimizer.predicted(2):
        model(x).square().mean().backward()
    twin(x).square().mean().backward()
    assert_same([p.grad for p in params], [q.grad for q in twin.parameters()])
    assert_bits(params, kept)
    optimizer.step()
    assert not torch.equal(params[0], kept[0])


def test_the_context_restores_after_an_exception() -> None:
    params, optimizer = trained()
    kept = bits(params)
    with pytest.raises(ZeroDivisionError), optimizer.predicted(2):
        raise ZeroDivisionError
    assert_bits(params, kept)
    optimizer.step()


@pytest.mark.parametrize("ends", ["left", "raised"])
def test_a_model_is_not_saved_while_its_weights_are_predicted(ends: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = st.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
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


def test_a_prediction_follows_new_momentum_and_moved_parameters() -> None:
    params, optimizer = trained()
    with optimizer.predicted(1):
        pass
    give_gradients(params)
    optimizer.step()
    for p in params:
        p.data = p.data.clone()
    optimizer.state[params[0]]["momentum_buffer"] = torch.ones(7, 5).double()
    kept = bits(params)
    with optimizer.predicted(1):
        for p, w in zip(params, kept, strict=True):
            v = optimizer.state[p]["momentum_buffer"]
            torch.testing.assert_close(p.detach(), w - 0.1 * v, rtol=1e-13, atol=1e-15)
    assert_bits(params, kept)


def test_restore_reaches_parameters_that_moved_meanwhile() -> None:
    params, optimizer = trained()
    kept = bits(params)
    optimizer.predict_(2)
    for p in params:
        p.data = p.data.clone()
    optimizer.restore_()
    assert_bits(params, kept)


def test_misuse_of_prediction_raises_and_changes_nothing() -> None:
    params, optimizer = trained()
    with pytest.raises(RuntimeError, match="predict_ first"):
        optimizer.restore_()
    kept = bits(params)
    optimizer.predict_(2)
    predicted, buffers = bits(params), bits(momenta(optimizer, params))
    state_dict = optimizer.state_dict()
    give_gradients(params)
    for misuse in (
        lambda: optimizer.predict_(1),
        lambda: optimizer.step(),
        lambda: optimizer.step(closure=lambda: None),
        lambda: optimizer.load_state_dict(state_dict),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer),
        lambda: optimizer.bind(None, {"momentum_buffer": {p: torch.empty_like(p) for p in params}}),
    ):
        with pytest.raises(RuntimeError, match="predicted"):
            misuse()
        assert_bits(params, predicted)
        assert_bits(momenta(optimizer, params), buffers)
        assert len(optimizer.param_groups) == 1
    optimizer.restore_()
    assert_bits(params, kept)
    optimizer.step()


def test_a_step_inside_of_predicted_says_how_to_leave() -> None:
    params, optimizer = trained()
    kept = bits(params)
    said = r"step: the weights are predicted; leave the block of predicted\(\) first, or .*restore_"
    with pytest.raises(RuntimeError, match=said), optimizer.predicted(1):
        optimizer.step()
    assert_bits(params, kept)


def test_a_closure_that_leaves_the_weights_predicted() -> None:
    params, optimizer = trained()
    give_gradients(params)
    kept = bits(params)
    with pytest.raises(RuntimeError, match="predicted"):
        optimizer.step(lambda: optimizer.predict_(1))
    optimizer.restore_()
    assert_bits(params, kept)


@pytest.mark.parametrize("steps", (-1, float("nan"), float("inf"), -1e-9))
def test_bad_steps(steps: float) -> None:
    params, optimizer = trained()
    kept = bits(params)
    with pytest.raises(ValueError, match="steps"):
        optimizer.predict_(steps)
    assert_bits(params, kept)
    with pytest.raises(RuntimeError):
        optimizer.restore_()


def test_prediction_needs_momentum_in_every_group() -> None:
    params = make_params()
    optimizer = st.optim.SGD(
        [{"params": params[:2]}, {"params": params[2:], "momentum": 0}], lr=0.1, momentum=0.9
    )
    give_gradients(params)
    optimizer.step()
    kept = bits(params)
    for predict in (optimizer.predict_, lambda s: optimizer.predicted(s).__enter__()):
        with pytest.raises(ValueError, match="group 1 has momentum 0"):
            predict(1)
    assert_bits(params, kept)
    with pytest.raises(ValueError, match="group 1"):
        optimizer.check_can_predict()
    optimizer.param_groups[1]["momentum"] = 0.5
    optimizer.check_can_predict()


def _interrupted_at(n: int, work: Callable[[], None]) -> bool:
    """Run work; raise KeyboardInterrupt at the n-th line inside the package, counted from 0."""
    try:
        with Interrupts(n):
            work()
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("twice", [False, True])
def test_an_interrupt_at_any_line_leaves_the_true_weights_or_says_so(twice: bool) -> None:
    params = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3).double())]
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    true = [p.detach().clone() for p in params]

    def work() -> None:
        with optimizer.predicted(2.0):
            pass

    n = -1
    interrupted = True
    while interrupted:
        n += 1
        interrupted = _interrupted_at(n, work)
        if interrupted and twice and optimizer._predicted is not None:
            for m in (1, 5, 10, 20):
                _interrupted_at(m, optimizer.restore_)
                if optimizer._predicted is None:
                    break
        if optimizer._predicted is not None:
            with pytest.raises(RuntimeError, match="restore_"):
                optimizer.step()
            optimizer.restore_()
        for p, kept in zip(params, true, strict=True):
            assert torch.equal(p, kept), f"interrupted at line {n}"
    assert n > 50
