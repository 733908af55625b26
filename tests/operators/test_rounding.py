"""Tests the statistics of stochastic rounding to bfloat16; its bits are in test_calls.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import spectrain_ext as st


def _step(w: Tensor, g: Tensor, seed: int | None, lr: float = 1.0) -> None:
    st.sgd_step_(w, g, None, lr=lr, momentum=0.0, rounding_seed=seed)


@pytest.mark.parametrize("fraction", [0.0625, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_probability_is_the_distance(fraction: float, sign: float) -> None:
    """Of n elements at `fraction` of the interval, k round up: within 5 deviations."""
    n, ulp = 1 << 18, 2.0**-7
    gradient = torch.full((n,), -sign * fraction * ulp).bfloat16()
    share = (gradient[0].double().abs() / ulp).item()
    shares = []
    for seed in range(4):
        w = torch.full((n,), sign, dtype=torch.bfloat16)
        _step(w, gradient, seed)
        moved = w != sign
        assert (w[moved] == sign * (1 + ulp)).all()
        shares.append(moved.double().mean().item())
    deviation = (share * (1 - share) / n) ** 0.5
    assert all(abs(s - share) < 5 * deviation for s in shares)
    assert abs(sum(shares) / 4 - share) < 5 * deviation / 2


def test_seeds_decide_independently() -> None:
    n = 1 << 16
    decisions = []
    for seed in (0, 1, 2**32, 2**63):
        w = torch.ones(n, dtype=torch.bfloat16)
        _step(w, torch.full_like(w, -(2.0**-8)), seed)
        decisions.append((w > 1).double())
    table = torch.corrcoef(torch.stack(decisions)) - torch.eye(4)
    assert table.abs().max() < 5 / n**0.5
    neighbours = torch.corrcoef(torch.stack([decisions[0][1:], decisions[0][:-1]]))
    assert abs(neighbours[0, 1]) < 5 / n**0.5
