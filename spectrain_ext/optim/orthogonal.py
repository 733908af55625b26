"""Muon's update: orthogonalizes a matrix's momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain_ext.operators.numbers import non_negative, number

from .matrices import MatrixUpdate, State

ADJUSTMENTS = (None, "original", "match_rms_adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonal(MatrixUpdate):
    """Hyperparameters of Muon's update, the orthogonalized momentum."""

    beta: float
    mixes: bool  # Nesterov
    coefficients: tuple[float, float, float]
    eps: float
    iterations: int
    adjusts: str | None

    def __post_init__(self) -> None:
        MatrixUpdate.__post_init__(self)  # slots: no super()
        non_negative("momentum", self.beta)
        non_negative("eps", self.eps)
        if not isinstance(self.coefficients, tuple) or len(self.coefficients) != 3:
            raise ValueError(f"ns_coefficients: expected three, got {self.coefficients!r}")
        for i, coefficient in enumerate(self.coefficients):
            number(f"ns_coefficients[{i}]", coefficient)
        if type(self.iterations) is not int or not 0 <= self.iterations < 100:
            raise ValueError(f"ns_steps: expected 0 to 99, got {self.iterations!r}")
        if self.adjusts not in ADJUSTMENTS:
            known = ", ".join(map(repr, ADJUSTMENTS))
            raise ValueError(f"adjust_lr_fn: expected one of {known}, got {self.adjusts!r}")

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        """Update the momentum and return the update, shaped like the weight."""
        gradient = gradient.to(momentum.dtype)
        momentum.lerp_(gradient, 1.0 - self.beta)
        mixed = gradient.lerp(momentum, self.beta) if self.mixes else momentum
        new = orthogonalized(mixed, self.coefficients, self.iterations, self.eps)
        rows, columns = weight.shape
        ratio = 0.2 * math.sqrt(max(rows, columns))
        if self.adjusts != "match_rms_adamw":
            ratio = math.sqrt(max(1.0, rows / columns))
        return torch.empty_like(weight).copy_(new).mul_(ratio)


def orthogonalized(
    matrix: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float
) -> Tensor:
    """Approximate U V^T of a matrix U S V^T, in bfloat16, by fifth-order Newton-Schulz iterations.

    The iteration is that of https://kellerjordan.github.io/posts/muon, with the order of operations
    of torch.optim.Muon. Singular values end between about 0.7 and 1.2.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if is_tall else x
    x /= x.norm().clamp(min=eps)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
