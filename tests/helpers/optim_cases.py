"""Parameters, gradients and comparisons of the optimizer tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spectrain_ext as st

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Over 20 steps: rounding once (here) against rounding after every operation (torch).
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.bfloat16: {"rtol": 6e-2, "atol": 6e-2},
    torch.float16: {"rtol": 8e-3, "atol": 8e-3},
}
OPTIONS = [
    {
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    for momentum, dampening, weight_decay, nesterov, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (0.0, 0.02), (False, True), (False, True)
    )
    if not nesterov or (momentum > 0 and dampening == 0)
]


def make_params(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Return parameters of many layouts: scalar, empty, channels_last, transposed, odd sizes."""
    tensors = [
        torch.randn(7, 5, dtype=dtype),
        torch.randn((), dtype=dtype),
        torch.empty(0, 3, dtype=dtype),
        torch.randn(4, 3, 5, 5, dtype=dtype).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 6, dtype=dtype).t(),
        torch.randn(1031, dtype=dtype),
    ]
    return [nn.Parameter(t) for t in tensors]


def twins(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def give_gradients(*lists: Sequence[nn.Parameter], none: Sequence[int] = ()) -> None:
    """Give corresponding parameters of every list the same new random gradient, or None."""
    for row, same in enumerate(zip(*lists, strict=True)):
        grad = torch.randn_like(same[0]) * 0.3
        for p in same:
            p.grad = None if row in none else grad.clone()


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.detach(), b.detach(), **TOLERANCE[a.dtype])


def bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def assert_bits(tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    for a, b in zip(tensors, kept, strict=True):
        assert torch.equal(a.detach(), b)


def momenta(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[Any]:
    return [optimizer.state.get(p, {}).get("momentum_buffer") for p in params]


def trained(
    dtype: torch.dtype = torch.float64, steps: int = 3, **options: Any
) -> tuple[list[nn.Parameter], st.optim.SGD]:
    params = make_params(dtype)
    optimizer = st.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})
    for _ in range(steps):
        give_gradients(params)
        optimizer.step()
    return params, optimizer


# The optimizers other than SGD, and their settings in the tests.
ADAM_OPTIONS = [
    {"betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    for betas, eps, weight_decay, maximize in itertools.product(
        ((0.9, 0.999), (0.0, 0.5)), (1e-8, 1e-3), (0.0, 0.05), (False, True)
    )
]
NADAM_OPTIONS = [
    {"decoupled_weight_decay": decoupled, "momentum_decay": decay, **options}
    for decoupled, decay, options in itertools.product((False, True), (4e-3, 0.1), ADAM_OPTIONS[:8])
]
ADAMS = ("Adam", "AdamW", "NAdam")
ADAM_CASES = [
    *(("Adam", options) for options in ADAM_OPTIONS),
    *(("Adam", {"decoupled_weight_decay": True, **options}) for options in ADAM_OPTIONS[:4]),
    *(("AdamW", options) for options in ADAM_OPTIONS),
    *(("NAdam", options) for options in NADAM_OPTIONS),
]
every_adam = pytest.mark.parametrize("name", ADAMS)


def pair_of(
    name: str, params: Sequence[nn.Parameter], **options: Any
) -> tuple[list[nn.Parameter], Any, Any]:
    """Return copies of the parameters, our optimizer of these, and torch's of the copies."""
    theirs = twins(params)
    optimizer = getattr(st.optim, name)(params, **options)
    return theirs, optimizer, getattr(torch.optim, name)(theirs, **options)


def states(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    return [dict(optimizer.state.get(p, {})) for p in params]


def assert_same_state(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].device == b[key].device
            assert_same([a[key]], [b[key]])


def adam_terms(group: dict[str, Any], name: str, t: int) -> tuple[float, float, float]:
    """Return the factors of m and g at update t, and the root of u's bias correction."""
    (b1, b2), lr = group["betas"], group["lr"]
    root = math.sqrt(1 - b2**t)
    if name != "NAdam":
        return lr / (1 - b1**t), 0.0, root

    def mu(i: int) -> float:
        return b1 * (1 - 0.5 * 0.96 ** (i * group["momentum_decay"]))

    product = math.prod(mu(i) for i in range(1, t + 1))
    return lr * mu(t + 1) / (1 - product * mu(t + 1)), lr * (1 - mu(t)) / (1 - product), root


def adam_step(
    name: str, group: dict[str, Any], t: int, w: Tensor, g: Tensor, m: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute update t of Adam, AdamW or NAdam in float64: new w, m and u."""
    w, g, m, u = (x.double() for x in (w, g, m, u))
    (b1, b2), decay = group["betas"], group["weight_decay"]
    g = -g if group["maximize"] else g
    if group["decoupled_weight_decay"]:
        w = w * (1 - group["lr"] * decay)
    else:
        g = g + decay * w
    m = b1 * m + (1 - b1) * g
    u = b2 * u + (1 - b2) * g * g
    of_m, of_g, root = adam_terms(group, name, t)
    return w - (of_m * m + of_g * g) / (u.sqrt() / root + group["eps"]), m, u
