"""SGD: torch.optim.SGD with one fused pass per step, and predictions of the weights to come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.numbers import Sgd

from .base import PredictingOptimizer
from .rule import REFUSED, Group, Rule, plain, rate

_EXTRAS = ("ema", "decoupled_weight_decay")


def _numbers(group: Group) -> Sgd:
    momentum = plain(group["momentum"], "momentum")
    return Sgd(
        rate(group["lr"]),
        momentum,
        group["dampening"],
        plain(group["weight_decay"], "weight_decay"),
        bool(group["nesterov"]) and momentum != 0,  # Nesterov's of 0 is none, as in torch
        bool(group["maximize"]),
        bool(group.get("decoupled_weight_decay", False)),
        bool(group.get("ema", False)),
    )


class SGD(PredictingOptimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum that can predict the weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are ``torch.optim.SGD``'s; checkpoints
    load in both directions. A step is one launch per device for all groups (two where some groups
    have momentum and others have none). The arithmetic is float32 for weights of at most 32 bits
    (16-bit weights and momentum are rounded once per step, where torch's unfused step rounds after
    every operation) and float64 for float64.

    Args:
        params: parameters, named parameters or parameter groups: float32, float64, float16 or
            bfloat16, strided, on any devices.
        lr: learning rate (>= 0), a number or a CPU tensor with one element, or one on the device of
            all parameters, which kernels read when they run.
        momentum: momentum factor mu (>= 0).
        dampening: dampening of the gradient in the momentum, not applied to a buffer's first step.
        weight_decay: L2 penalty (>= 0).
        nesterov: Nesterov momentum; needs momentum and no dampening.
        maximize: ascend instead of descend.
        foreach: accepted for compatibility, without effect.
        differentiable: must be False.
        fused: accepted for compatibility, without effect.
        momentum_dtype: dtype of the momentum buffers; None means the parameter's. 16-bit parameters
            may have ``torch.float32`` momentum.
        ema: averaged momentum, ``v = momentum*v + (1 - momentum)*g`` from ``v = 0``, as the
            SpecTrain paper writes it; needs ``0 < momentum < 1`` and no dampening.
        decoupled_weight_decay: shrink the weights by ``1 - lr*weight_decay`` before each step
            instead of adding an L2 penalty to the gradient.

    ``ema`` and ``decoupled_weight_decay`` are keys of the parameter groups where they are asked
    for, and can be given per group.

    Raises:
        ValueError: ``differentiable=True``, a number out of range or NaN, a duplicate parameter.
        TypeError: a parameter or ``momentum_dtype`` that the kernels do not know.

    The prediction (SpecTrain, arXiv 1809.02839, equation 4) of the weights ``steps`` updates ahead
    is ``W - lr*steps*v``, with v the momentum buffer. A parameter that has no momentum buffer yet
    is predicted to stay as it is.
    """

    _rule = Rule(_numbers, ("momentum_buffer",), ("momentum_buffers",), {}, REFUSED)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
        ema: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        self._prepare(momentum_dtype)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        # Only where they are asked for: by default the groups' keys are torch's.
        asked = {"ema": ema, "decoupled_weight_decay": decoupled_weight_decay}
        self.defaults.update((key, True) for key in _EXTRAS if asked[key])
        self._complete_groups()
        for index in range(len(self.param_groups)):
            self._check_group(index)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over state; groups that were saved by torch.optim.SGD lack this class's extras."""
        super().__setstate__(state)
        self._complete_groups()

    def _complete_groups(self) -> None:
        for key in _EXTRAS:
            if key in self.defaults:
                for group in self.param_groups:
                    group.setdefault(key, self.defaults[key])
