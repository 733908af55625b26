"""NAdam: torch.optim's, with one fused pass per step, and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.numbers import Adam as AdamNumbers
from spectrain_ext.operators.numbers import non_negative

from .adam import AdamRule
from .base import PredictingOptimizer
from .rule import Scalars, plain


class NAdamRule(AdamRule):
    """Adam with a momentum that changes from step to step, and the product of its values."""

    scalars: ClassVar[Mapping[str, float]] = {"step": 0.0, "mu_product": 1.0}

    def numbers(self, group: Mapping[str, Any]) -> AdamNumbers:
        """The numbers of a first step."""
        decay = non_negative("momentum_decay", plain(group["momentum_decay"], "momentum_decay"))
        first = replace(super().numbers(group), momentum_decay=decay, mu_product=0.0)
        return replace(first, mu_product=first.mu(1))

    def advance(self, numbers: AdamNumbers, scalars: Scalars) -> Scalars:
        """Count, and multiply in the precision that torch keeps the product in."""
        step = scalars[0] + 1.0
        wide = torch.get_default_dtype() == torch.float64
        dtype = torch.float64 if wide else torch.float32
        product = torch.tensor(scalars[1], dtype=dtype, device="cpu")
        return step, product.mul_(numbers.mu(step)).item()

    def at(self, numbers: AdamNumbers, scalars: Scalars) -> AdamNumbers:
        """The same numbers at another step."""
        return replace(numbers, step=int(scalars[0]), mu_product=scalars[1])


class NAdam(PredictingOptimizer, torch.optim.NAdam):
    """Adam with Nesterov momentum (Dozat, 2016), ``torch.optim.NAdam`` that can predict.

    As ``Adam``, which see; with ``momentum_decay`` (>= 0), the pace at which the momentum grows.
    The prediction goes on with the momentum part of the last step, without a gradient.
    """

    _rule = NAdamRule()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(momentum_dtype)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            momentum_decay,
            decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
        )
