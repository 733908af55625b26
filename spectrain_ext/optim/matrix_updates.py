"""Updates of matrices by Muon and SOAP, expressed as steps of SGD, so that all laws apply."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from spectrain_ext.operators.numbers import AdamNumbers, SgdNumbers, fraction, non_negative, number

from .saved import loose_dtype

State: TypeAlias = MutableMapping[str, Any]  # of one parameter

#: Of a matrix: keys of its state, by which it can be rotated.
SIDES = ("left", "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUpdate(SgdNumbers):
    """A matrix update as SGD with momentum 1, whose gradient is the change of the update.

    SGD's buffer is then the last update, so every law of SGD predicts along it, and the
    second-order law uses its last change.
    """

    # Half the last change: the norm of such an update hardly depends on the gradient's. With half,
    # Muon with gradients 1, 2 or 4 updates late ended with a lower loss than with none of the
    # change or the difference law, and from 2 on lower than with all of it. At 7 updates seeds
    # differ by as much. For SOAP none, half and all differ less than seeds.
    trust: ClassVar[float] = 0.5

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        """Update momentum and other state; return this step's update, shaped like the weight."""
        raise NotImplementedError


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
        if self.adjusts not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                "adjust_lr_fn: expected one of None, 'original', 'match_rms_adamw', "
                f"got {self.adjusts!r}"
            )

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated(MatrixUpdate):
    """Hyperparameters of SOAP's update, with an unrotated momentum."""

    adam: AdamNumbers
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
        """Return keys and shapes of a matrix's state outside the buffers of ``bind``."""
        shapes = {"exp_avg_sq": tuple(shape)}
        for side, size in zip(SIDES, shape, strict=True):
            if size <= self.max_dimension:
                shapes[side] = shapes[f"{side}_basis"] = size, size
        return shapes

    def update(
        self, weight: Tensor, gradient: Tensor, momentum: Tensor, state: State, step: int
    ) -> Tensor:
        dtype = loose_dtype(weight)
        is_new = {}
        for key, shape in self.loose(weight.shape).items():
            tensor = state.get(key)
            is_new[key] = tensor is None
            if tensor is None:
                tensor = torch.zeros(shape, device=weight.device)
            state[key] = tensor.to(weight.device, dtype)  # the parameter may have moved
        momentum.lerp_(gradient.to(momentum.dtype), 1.0 - self.adam.betas[0])
        gradient, squares = gradient.to(dtype), state["exp_avg_sq"]
        bases: list[Tensor | None] = [None, None]
        for i, side in enumerate(SIDES):
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


def _turned(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Return eigenvectors by descending eigenvalue, or the identity (Adam) if it fails."""
    if bool(matrix.isfinite().all()):  # no extra cost: eigh synchronizes too
        for dtype in (matrix.dtype, torch.float64):
            try:
                vectors: Tensor = torch.linalg.eigh(matrix.to(dtype)).eigenvectors
                return vectors.flip(1)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                continue
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
