"""Stages and batches with values that are not finite."""

from __future__ import annotations

from math import inf, nan

import torch
from torch import nn


class Overflow(torch.autograd.Function):
    """Identity; its gradient is infinite if any number of ``given`` is at least 100.

    Of a complex one only the imaginary part.
    """

    @staticmethod
    def forward(ctx, value, given):
        ctx.overflows = bool((given.abs() >= 100).any())
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.overflows and gradient.is_complex():
            gradient = torch.complex(gradient.real, torch.full_like(gradient.imag, inf))
        elif ctx.overflows:
            gradient = gradient * inf
        return gradient, None


class Passes(nn.Module):
    """A layer that passes numbers of 100 or more unchanged; see ``where``."""

    def __init__(self, where=None):
        super().__init__()
        self.linear, self.where = nn.Linear(5, 5), where

    def forward(self, x):
        weight = self.linear.weight
        if self.where == "weight":  # only its gradient is not finite
            weight = Overflow.apply(weight, x)
        y = nn.functional.linear(x, weight, self.linear.bias).tanh()
        if self.where == "output":
            y = Overflow.apply(y, x)
        return torch.where(x >= 100, x, y)


class Overflows(nn.Module):
    def forward(self, x):
        return Overflow.apply(x, x)


def infinite(output, target):
    """A loss that is infinite, with finite gradients, if a target is at least 1000."""
    return (
        (output - target.clamp(max=2)).square().mean()
        + (target * 1e306).amax().clamp(min=1e308)
        - 1e308
    )


def everything(n=3):
    """Return stages with running statistics and random numbers."""
    return [
        nn.Sequential(
            *(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 5))
        )
        for _ in range(n)
    ]


def poisoned(batch, what, number=nan):
    value, target = (tensor.clone() for tensor in batch)
    (value if what == "input" else target)[-1, 2] = number
    return value, target
