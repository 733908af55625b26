"""Tests every optimizer's predictions by every law: in place, elsewhere, and with the step."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    adam_terms,
    assert_bits,
    bits,
    every_adam,
    give_gradients,
    make_params,
    trained,
    twins,
)
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.operators.laws import Geometric, Linear, SecondOrder

exact = {"rtol": 1e-12, "atol": 1e-13}
RATES = (0.05, 0.02, 0.0, 0.1)


def zero_gradient_steps(optimizer: Any, rates: list[float]) -> list[Tensor]:
    """Return the weights of a copy of the optimizer after steps with zero gradients."""
    optimizer = copy.deepcopy(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    return bits(params)


SGD_OPTIONS = [
    {"nesterov": nesterov, "smoothed": smoothed, **decay}
    for nesterov, smoothed, decay in itertools.product(
        (False, True),
        (False, True),
        ({}, {"weight_decay": 0.05}, {"weight_decay": 0.05, "decoupled_weight_decay": True}),
    )
]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_geometric_sgd_is_steps_with_zero_gradients(options: dict[str, Any]) -> None:
    params, optimizer = trained(**options)
    expected = zero_gradient_steps(optimizer, [0.1] * 4)
    kept = bits(params)
    with optimizer.predicted(Geometric(4)):
        for p, wanted in zip(params, expected, strict=True):
            torch.testing.assert_close(p.detach(), wanted, **exact)
    assert_bits(params, kept)


def test_linear_laws_of_sgd() -> None:
    params, optimizer = trained()
    kept = bits(params)
    for law, distance in ((2.5, 0.25), (Linear(2.5), 0.25)):
        with optimizer.predicted(law):
            for p, w in zip(params, kept, strict=True):
                v = optimizer.state[p]["momentum_buffer"]
                torch.testing.assert_close(p.detach(), w - distance * v, **exact)
        assert_bits(params, kept)


def adam_trained(name: str, **options: Any) -> tuple[list[nn.Parameter], Any, dict[str, Any]]:
    params = make_params()
    optimizer = getattr(st.optim, name)(params, **{"lr": 0.1, "weight_decay": 0.05, **options})
    for _ in range(3):
        give_gradients(params)
        optimizer.step()
    return params, optimizer, optimizer.param_groups[0]


def msnag(name: str, group: dict[str, Any], w: Tensor, state: Any, rates: list[float]) -> Tensor:
    """FTPipe's rule: bias corrections advance, m decays by beta1, u is constant."""
    t = int(state["step"])
    m, u = state["exp_avg"].double(), state["exp_avg_sq"].double()
    for i, rate in enumerate(rates, 1):
        of_m, _, root = adam_terms({**group, "lr": rate}, name, t + i)
        if group["decoupled_weight_decay"]:
            w = w * (1 - rate * group["weight_decay"])
        w = w - of_m * group["betas"][0] ** i * m / (u.sqrt() / root + group["eps"])
    return w


@every_adam
@pytest.mark.parametrize("decay", (0.0, 0.05))
def test_adams_laws(name: str, decay: float) -> None:
    params, optimizer, group = adam_trained(name, weight_decay=decay)
    kept = bits(params)
    # mu_product is kept in float32, as torch keeps it.
    close = {"rtol": 1e-6, "atol": 1e-6} if name == "NAdam" else exact

    def linear(w: Tensor, state: Any, distance: float) -> Tensor:
        of_m, _, root = adam_terms({**group, "lr": distance}, name, 3)
        return w - of_m * state["exp_avg"] / (state["exp_avg_sq"].sqrt() / root + group["eps"])

    laws: list[tuple[Any, Any]] = [
        (3, lambda w, s: linear(w, s, 0.3)),
        (1.5, lambda w, s: linear(w, s, 0.15)),
        (Geometric(3), lambda w, s: msnag(name, group, w, s, [0.1] * 3)),
        (0, lambda w, s: w),
    ]
    for law, expected in laws:
        with optimizer.predicted(law):
            for p, w in zip(params, kept, strict=True):
                torch.testing.assert_close(p.detach(), expected(w, optimizer.state[p]), **close)
        assert_bits(params, kept)


@every_adam
def test_parameters_that_were_never_updated_stay_as_they_are(name: str) -> None:
    params = make_params()
    optimizer = getattr(st.optim, name)(params, lr=0.1, eps=0.0, weight_decay=0.1)
    laws = (4, Geometric(2))
    kept = bits(params)
    for law in laws:
        with optimizer.predicted(law):
            assert_bits(params, kept)
    give_gradients(params, none=[0, 4])
    optimizer.step()
    kept = bits(params)
    for law in laws:
        with optimizer.predicted(law):
            same = [torch.equal(p.detach(), k) for p, k in zip(params, kept, strict=True)]
            assert same == [True, False, True, False, True, False]
        assert_bits(params, kept)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    (
        "SGD",
        {"momentum": 0.9, "smoothed": True, "decoupled_weight_decay": True, "weight_decay": 0.1},
    ),
    ("Adam", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1}),
    ("NAdam", {}),
]
every_optimizer = pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)


class Bound:
    """An optimizer on its own buffers, and an ordinary one with the same weights."""

    def __init__(self, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
        self.params = make_params(dtype)
        self.twins = twins(self.params)
        make = getattr(st.optim, name)

        def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
            return [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]

        self.optimizer = make(groups(self.params), lr=0.1, **options)
        self.reference = make(groups(self.twins), lr=0.1, **options)
        self.master = {p: p.detach().clone() for p in self.params}
        self.buffers = {
            key: {p: torch.full_like(p, float("nan")).detach() for p in self.params}
            for key in self.optimizer.buffer_keys
        }
        self.outs = {p: torch.full_like(p, float("nan")).detach() for p in self.params}
        self.optimizer.bind(self.master, self.buffers)

    def step(self, none: list[int]) -> None:
        give_gradients(self.params, self.twins, none=none)
        self.optimizer.step()
        self.reference.step()
        assert_bits(list(self.master.values()), bits(self.twins))
        for p, q in zip(self.params, self.twins, strict=True):
            ours, theirs = self.optimizer.state.get(p, {}), self.reference.state.get(q, {})
            assert ours.keys() == theirs.keys()
            assert_bits(list(ours.values()), list(theirs.values()))
            for key in self.buffers:
                view = self.buffers[key][p]
                assert ours[key] is view if ours else (view == 0).all()

    def predicted(self, law: Any) -> list[Tensor]:
        with self.reference.predicted(law):
            return bits(self.twins)


@every_optimizer
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("law", (0, 2, 2.5, Geometric(3)), ids=str)
def test_a_prediction_is_written_directly_and_with_the_next_step(
    name: str, options: dict[str, Any], dtype: torch.dtype, law: Any
) -> None:
    pair = Bound(name, dtype, options)
    pair.optimizer.write_prediction(pair.outs, law)
    assert_bits(list(pair.outs.values()), list(pair.master.values()))
    for none in ([], [0], [], [0, 1, 2, 3, 4, 5], [5], [5], []):
        pair.optimizer.write_with_next_step(pair.outs, law)
        pair.step(none)
        assert_bits(list(pair.outs.values()), pair.predicted(law))
        kept = bits(list(pair.outs.values()))
        pair.optimizer.write_prediction(pair.outs, law)
        assert_bits(list(pair.outs.values()), kept)


@every_optimizer
def test_second_order_predictions_come_with_the_step(name: str, options: dict[str, Any]) -> None:
    pair = Bound(name, torch.float64, options)
    law = SecondOrder(2, 1)
    before = None
    for none in ([4], [], [1, 3], []):  # the last one has its first step after the others
        if none:
            before = {p: pair.predicted(3)[i] for i, p in enumerate(pair.params) if i in none}
        old = {p: {k: b[p].clone() for k, b in pair.buffers.items()} for p in pair.params}
        pair.optimizer.write_with_next_step(pair.outs, law)
        pair.step(none)
        key = pair.optimizer.buffer_keys[0]
        for i, (p, out) in enumerate(pair.outs.items()):
            if i in none:
                # Its momentum did not change: the linear prediction, delay + lead updates ahead.
                torch.testing.assert_close(out, before[p], **exact)
                continue
            group = pair.optimizer.param_groups[i > 1]
            v, v_before = pair.buffers[key][p], old[p][key]
            ahead = 3 * v + 3 * (v - v_before)
            if name == "SGD":
                wanted = pair.master[p] - group["lr"] * ahead
            else:
                state = pair.optimizer.state[p]
                of_m, _, root = adam_terms(group, name, int(state["step"]))
                scale = state["exp_avg_sq"].sqrt() / root + group["eps"]
                wanted = pair.master[p] - of_m * ahead / scale
            close = (
                {"rtol": 1e-5, "atol": 1e-6} if name == "NAdam" else {"rtol": 1e-9, "atol": 1e-9}
            )
            torch.testing.assert_close(out, wanted, **close)


@every_optimizer
def test_laws_that_do_not_apply_raise_and_change_nothing(
    name: str, options: dict[str, Any]
) -> None:
    pair = Bound(name, torch.float64, options)
    pair.step([])
    pair.optimizer.write_prediction(pair.outs, 1)
    kept, params = bits(list(pair.outs.values())), bits(pair.twins)
    bad: list[Any] = [-1, float("nan"), SecondOrder(2)]
    if name != "SGD":
        bad += [Geometric(2.5), Geometric(65)]
    for law in bad:
        with pytest.raises(ValueError, match="steps"):
            pair.optimizer.write_prediction(pair.outs, law)
        with pytest.raises(ValueError, match="steps"):
            pair.reference.predict_(law)
        if not isinstance(law, SecondOrder):
            with pytest.raises(ValueError, match="steps"):
                pair.optimizer.write_with_next_step(pair.outs, law)
        with pytest.raises(RuntimeError):
            pair.reference.restore_()
    with pytest.raises(TypeError):
        pair.optimizer.write_prediction(pair.outs, "far")
    assert_bits(list(pair.outs.values()), kept)
    assert_bits(pair.twins, params)
    pair.step([])
    assert_bits(list(pair.outs.values()), kept)


def test_a_law_for_every_group() -> None:
    """One group stands still and one moves; groups without momentum may stand still."""
    params = make_params()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    optimizer = st.optim.SGD(groups, lr=0.1, momentum=0.9)
    give_gradients(params)
    optimizer.step()
    kept = bits(params)
    with optimizer.predicted((0, Geometric(2))):
        assert_bits(params[:2], kept[:2])
        moved = bits(params)
    with optimizer.predicted(Geometric(2)):
        assert_bits(params[2:], moved[2:])
    for wrong in ((1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(ValueError, match="expected one for each of 2 groups"):
            optimizer.predict_(wrong)
    assert_bits(params, kept)
