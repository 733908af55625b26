"""Parameters, gradients and comparisons that the tests of the optimizers share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import spectrain_ext as st

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Over a score of steps: rounding once (here) against rounding after every operation (torch).
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
    """Parameters of many layouts: plain, scalar, empty, channels_last, transposed, odd sizes."""
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
