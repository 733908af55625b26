"""SOAP's update: Adam in the eigenbasis of a matrix's gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain_ext.operators.numbers import Adam, fraction

from .matrices import MatrixUpdate, State

_SIDES = ("left", "right")
LOOSE = ("exp_avg_sq", *_SIDES, *(f"{side}_basis" for side in _SIDES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated(MatrixUpdate):
    """Hyperparameters of SOAP's update (arXiv 2409.11321), with an unrotated momentum.

    Basis rotation (arXiv 2602.03515) also keeps it unrotated; in exact arithmetic both are equal.
    """

    adam: Adam
    shampoo_beta: float
    frequency: int
    max_dimension: int

    def __post_init__(self) -> None:
        MatrixUpdate.__post_init__(self)  # slots: no super()
        fraction("shampoo_beta", self.shampoo_beta)
        for name, value, least in (
            ("precondition_frequency", self.frequency, 1),
            ("max_dimension", self.max_dimension, 0),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: expected a whole number >= {least}, got {value!r}")

    def loose(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return shapes of the rotated second moments and of each side's covariance and basis."""
        shapes = {"exp_avg_sq": tuple(shape)}
        for side, size in zip(_SIDES, shape, strict=True):
            if size <= self.max_dimension:
                shapes[side] = shapes[f"{side}_basis"] = size, size
        return shapes

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        """Update all state in place and return the update, shaped like the weight."""
        dtype = loose_dtype(weight)
        is_new = {}
        for key, shape in self.loose(weight.shape).items():
            found = state.get(key)
            is_new[key] = found is None
            if found is None:
                found = torch.zeros(shape, device=weight.device)
            state[key] = found.to(weight.device, dtype)  # the parameter may have moved
        momentum.lerp_(gradient.to(momentum.dtype), 1.0 - self.adam.betas[0])
        gradient, squares = gradient.to(dtype), state["exp_avg_sq"]
        bases: list[Tensor | None] = [None, None]
        for i, side in enumerate(_SIDES):
            if side not in is_new:
                continue
            rows, basis = (gradient.T if i else gradient), state[f"{side}_basis"]
            covariance = state[side].lerp_(rows @ rows.T, 1.0 - self.shampoo_beta)
            if is_new[f"{side}_basis"]:
                basis.copy_(_eigenvectors(covariance))
            elif step % self.frequency == 0:
                turned = covariance @ basis
                order = (basis * turned).sum(0).argsort(descending=True)
                squares.copy_(squares.index_select(i, order))
                basis.copy_(torch.linalg.qr(turned[:, order]).Q)  # an iteration of the power method
            bases[i] = basis
        left, right = bases
        into = None if left is None else left.T, right
        out_of = left, None if right is None else right.T

        beta1, beta2 = self.adam.betas
        turned = _turned(gradient, *into)
        squares.mul_(beta2).addcmul_(turned, turned, value=1.0 - beta2)
        scaled = _turned(momentum.to(dtype), *into) / squares.sqrt().add_(self.adam.eps)
        factor = (1.0 - beta2**step) ** 0.5 / (1.0 - beta1**step)
        return torch.empty_like(weight).copy_(_turned(scaled, *out_of).mul_(factor))


def loose_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _turned(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Return eigenvectors by descending eigenvalue, or the identity (Adam) if it fails."""
    if bool(matrix.isfinite().all()):  # no extra cost: eigh synchronizes too
        for dtype in (matrix.dtype, torch.float64):
            try:
                found: Tensor = torch.linalg.eigh(matrix.to(dtype)).eigenvectors
                return found.flip(1)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                continue
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
