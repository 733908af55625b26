"""Tests many steps beside torch.optim, and beside plain arithmetic of what torch has not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ops_reference import nadam_product
from torch import Tensor

import spectrain_ext as st

_SHAPES = [(17,), (4, 5), (3, 2, 2), (1,), (0,), (129,)]
_STEPS = 40
_SGD = [
    {"momentum": mu, "dampening": damp, "weight_decay": decay, "nesterov": nesterov, "maximize": up}
    for mu, damp, decay, nesterov, up in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (0.0, 0.05), (False, True), (False, True)
    )
    if not nesterov or (mu > 0 and damp == 0)
]
_DECOUPLED = {"decoupled_weight_decay": True}
#: torch's optimizer, its options, and ours besides.
_ADAM: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Adam", {}, {}),
    ("Adam", {"maximize": True, "weight_decay": 0.05}, {}),
    ("Adam", {"betas": (0.5, 0.9), "eps": 1e-3}, {}),
    ("Adam", {"betas": (0.0, 0.99)}, {}),
    ("AdamW", {"weight_decay": 0.1}, _DECOUPLED),
    ("AdamW", {"weight_decay": 0.1, "maximize": True}, _DECOUPLED),
    ("NAdam", {"momentum_decay": 4e-3}, {}),
    ("NAdam", {"momentum_decay": 0.1, "weight_decay": 0.05}, {}),
    ("NAdam", {"momentum_decay": 4e-3, "weight_decay": 0.1, **_DECOUPLED}, {}),
]
Step = Callable[[int, list[Tensor], list[Tensor], list[Tensor], list[Tensor]], None]


def _both(kind: str, options: dict[str, Any], step: Step) -> list[tuple[Tensor, Tensor]]:
    """Return our weights and torch's after the same float64 gradients."""
    start = [torch.randn(shape, dtype=torch.float64) for shape in _SHAPES]
    params = [torch.nn.Parameter(t.clone()) for t in start]
    optimizer = getattr(torch.optim, kind)(params, **options)
    w = [t.clone() for t in start]
    m, u = ([torch.zeros_like(t) for t in start] for _ in range(2))
    for i in range(1, _STEPS + 1):
        grads = [torch.randn_like(t) for t in start]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        step(i, w, grads, m, u)
    return list(zip(w, (p.detach() for p in params), strict=True))


@pytest.mark.parametrize("options", _SGD, ids=str)
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    def step(i: int, w: list[Tensor], g: list[Tensor], v: list[Tensor], _: list[Tensor]) -> None:
        st.sgd_step_(w, g, v, lr=0.05, first_step=i == 1, **options)

    for ours, theirs in _both("SGD", {"lr": 0.05, **options}, step):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("kind", "options", "more"), _ADAM, ids=str)
def test_adam_is_torchs(kind: str, options: dict[str, Any], more: dict[str, Any]) -> None:
    def step(i: int, w: list[Tensor], g: list[Tensor], m: list[Tensor], u: list[Tensor]) -> None:
        mu: dict[str, Any] = {}
        if kind == "NAdam":
            mu = {"mu_product": nadam_product(0.9, options["momentum_decay"], i)}
        st.adam_step_(w, g, m, u, lr=0.01, step=i, **options, **more, **mu)

    # NAdam: torch keeps mu_product in float32, accurate to 1e-6 of a step of 0.01.
    loose = 1e-8 if kind == "NAdam" else 1e-13
    for ours, theirs in _both(kind, {"lr": 0.01, **options}, step):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=loose)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_what_torch_has_not(smoothed: bool, decoupled: bool, nesterov: bool) -> None:
    """v = mu*v + (1-mu)*d as in the paper; decay that does not enter the momentum."""
    lr, mu, decay = 0.05, 0.9, 0.3
    w, v = torch.randn(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    our_w, our_v = w.clone(), v.clone()
    for i in range(_STEPS):
        g = torch.randn(50, dtype=torch.float64)
        d = g if decoupled else g + decay * w
        gain = 1 - mu if smoothed else 1.0
        v = d.clone() if i == 0 else mu * v + gain * d
        if decoupled:
            w = w - lr * decay * w
        w = w - lr * (gain * d + mu * v if nesterov else v)
        st.sgd_step_(
            our_w, g, our_v, lr=lr, momentum=mu, weight_decay=decay, nesterov=nesterov,
            decoupled_weight_decay=decoupled, smoothed=smoothed, first_step=i == 0,
        )  # fmt: skip
    torch.testing.assert_close(our_w, w, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(our_v, v, rtol=1e-12, atol=1e-13)


def test_scaled_gradients_of_torchs_fused_sgd() -> None:
    x = [[torch.randn(n) for n in (1, 7, 1025)] for _ in range(3)]
    t = [[tensor.clone() for tensor in tensors] for tensors in x]
    gate = {"grad_scale": torch.tensor(3.0), "found_inf": torch.tensor(0.0)}
    torch._fused_sgd_(
        *t, weight_decay=0.01, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False, **gate,
    )  # fmt: skip
    st.sgd_step_(*x, lr=0.1, momentum=0.9, weight_decay=0.01, **gate)
    torch.testing.assert_close(x[0], t[0])
    torch.testing.assert_close(x[2], t[2])


@pytest.mark.parametrize("magnitude", [1e-30, 1e-24, 1e18, 1e19, 1e20])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam"])
def test_extreme_gradients_are_taken_as_torch_takes_them(name: str, magnitude: float) -> None:
    """The square of 1e20 overflows float32; (1 - beta2)*g*g in torch's order does not."""
    gradients = [magnitude, -magnitude, 1.0, -1e-3 * magnitude]
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    mine = getattr(st.optim, name)([p], lr=1e-2)
    theirs = getattr(torch.optim, name)([q], lr=1e-2, foreach=False)
    for factor in (1.0, 0.5, -0.25):
        for x in (p, q):
            x.grad = factor * torch.tensor(gradients)
        mine.step()
        theirs.step()
        second = mine.state[p]["exp_avg_sq"]
        assert p.isfinite().all() and second.isfinite().all()
        assert magnitude < 1.0 or p.ne(1.0).all()
        if (name, magnitude) != ("NAdam", 1e20):  # torch divides its u by 1 - beta2: infinite
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(second, theirs.state[q]["exp_avg_sq"], rtol=1e-5, atol=0.0)
