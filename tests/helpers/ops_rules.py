"""Adam's step, and predictions of every rule, in the arithmetic of ops_reference.py.

Coefficients are formed in double and rounded once to the compute type; square roots and divisions
are IEEE's, as in numpy. csrc/core/setting.h defines the terms of a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers.ops_reference import (
    Array,
    as_type,
    clone,
    direction,
    fma,
    narrow,
    scalars_like,
    shrink,
    widen,
)
from torch import Tensor

from spectrain_ext.operators.numbers import Term


@dataclass(frozen=True)
class Adam:
    lr: float
    step: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False
    momentum_decay: float | None = None
    mu_product: float = 0.0

    def keywords(self) -> dict[str, Any]:
        return dict(vars(self))

    def at(self, step: int) -> Adam:
        product = 1.0
        for i in range(1, step + 1):
            product *= self.mu(i)
        return Adam(**{**vars(self), "step": step, "mu_product": product})

    def mu(self, step: int) -> float:
        """Return NAdam's momentum of an update."""
        if self.momentum_decay is None:
            return 0.0
        return self.betas[0] * (1.0 - 0.5 * 0.96 ** (step * self.momentum_decay))

    def rates(self) -> tuple[float, float, float]:
        """Return the factors of the first moment, the gradient, and the second moment's root."""
        beta1, beta2 = self.betas
        root = (1.0 - beta2**self.step) ** -0.5
        if self.momentum_decay is None:
            return self.lr / (1.0 - beta1**self.step), 0.0, root
        now, following = self.mu(self.step), self.mu(self.step + 1)
        product = self.mu_product
        return (
            self.lr * following / (1.0 - product * following),
            self.lr * (1.0 - now) / (1.0 - product),
            root,
        )

    def direction(self, w: Tensor, g: Tensor) -> Array:
        l2 = 0.0 if self.decoupled_weight_decay else self.weight_decay
        return direction(w, g, maximize=self.maximize, l2=l2)

    def updated(
        self, w: Tensor, g: Tensor | None, m: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return new weights and moments; a missing gradient leaves all unchanged."""
        if g is None:
            return clone(w), clone(m), clone(u)
        wide = widen(w)
        scalar = scalars_like(wide)
        beta1, beta2 = self.betas
        by_moment, by_gradient, root = self.rates()
        with np.errstate(all="ignore"):
            d = self.direction(w, g)
            new_m = fma(scalar(beta1), as_type(widen(m), wide), scalar(1.0 - beta1) * d)
            new_u = fma(scalar(beta2), as_type(widen(u), wide), scalar(1.0 - beta2) * d * d)
            if self.decoupled_weight_decay:
                wide = shrink(wide, self.lr * self.weight_decay)
            new_w = wide - _step(scalar, by_moment, by_gradient, root, self.eps, new_m, new_u, d)
        return narrow(new_w, w), narrow(new_m, m), narrow(new_u, u)


def _step(
    scalar: Any,
    by_moment: float,
    by_gradient: float,
    root: float,
    eps: float,
    m: Array,
    u: Array,
    d: Array,
) -> Array:
    """Return the quotient that Adam moves by."""
    moment = scalar(by_moment) * m
    gradient = scalar(by_gradient)
    if gradient != 0:
        moment = fma(scalar(by_moment), m, gradient * d)
    denominator = fma(np.sqrt(u), scalar(root), np.broadcast_to(scalar(eps), u.shape))
    return np.asarray(moment / denominator)


def predict_adam(
    terms: Sequence[Term],
    w: Tensor,
    m: Tensor,
    u: Tensor,
    *,
    eps: float,
    d: Array | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Apply the updates in turn to stored values; an update that does not move keeps W."""
    out = w if like is None else like
    wide = widen(w)
    scalar = scalars_like(wide)
    if not terms and out.dtype == w.dtype:
        return clone(w)
    wide_m, wide_u = as_type(widen(m), wide), as_type(widen(u), wide)
    none = np.zeros_like(wide) if d is None else d
    with np.errstate(all="ignore"):
        for t in terms:
            still = scalar(t.momentum) == 0 and scalar(t.gradient) == 0
            wide = _keep(scalar, t.keep, wide)
            if not still:
                wide = wide - _step(
                    scalar, t.momentum, t.gradient, t.root, eps, wide_m, wide_u, none
                )
    return narrow(wide, out)


def predict_sgd(
    terms: Sequence[Term],
    w: Tensor,
    v: Tensor,
    *,
    d: Array | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """keep*W - gradient*d - momentum*v from stored values; a coefficient of 0 keeps W."""
    out = w if like is None else like
    wide = widen(w)
    scalar = scalars_like(wide)
    if not terms and out.dtype == w.dtype:
        return clone(w)
    wide_v = as_type(widen(v), wide)
    with np.errstate(all="ignore"):
        for t in terms:
            wide = _keep(scalar, t.keep, wide)
            if scalar(t.gradient) != 0:
                assert d is not None
                wide = fma(-scalar(t.gradient), d, wide)
            if scalar(t.momentum) != 0:
                wide = fma(-scalar(t.momentum), wide_v, wide)
    return narrow(wide, out)


def _keep(scalar: Any, factor: float, wide: Array) -> Array:
    rounded = scalar(factor)
    return wide if rounded == 1 else np.asarray(rounded * wide)
