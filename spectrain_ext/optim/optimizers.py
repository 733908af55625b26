"""SGD, Adam, AdamW and NAdam: torch.optim's, with one fused pass per step, and predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import rule
from .base import PredictingOptimizer

_EXTRAS = ("ema", "decoupled_weight_decay")  # of SGD, that torch's has not


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

    _rule = rule.SGD

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


class Adam(PredictingOptimizer, torch.optim.Adam):
    """Adam that can predict the weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are ``torch.optim.Adam``'s; checkpoints
    load in both directions. A step is one launch per device for all groups. The arithmetic is
    float32 for weights of at most 32 bits (16-bit weights and moments are rounded once per step,
    where torch's unfused step rounds after every operation) and float64 for float64.

    Args:
        params: parameters, named parameters or parameter groups: float32, float64, float16 or
            bfloat16, strided, on any devices.
        lr: learning rate (>= 0), a number or a CPU tensor with one element, or one on the device of
            all parameters, which kernels read when they run.
        betas: decay of the first and of the second moment, each in [0, 1).
        eps: added to the root of the second moment (>= 0).
        weight_decay: L2 penalty, or decoupled decay (>= 0).
        amsgrad: must be False.
        foreach: accepted for compatibility, without effect.
        maximize: ascend instead of descend.
        capturable: must be False.
        differentiable: must be False.
        fused: accepted for compatibility, without effect.
        decoupled_weight_decay: makes it AdamW.
        momentum_dtype: dtype of the moments; None means the parameter's. 16-bit parameters may have
            ``torch.float32`` moments.

    Raises:
        ValueError: ``amsgrad``, ``capturable`` or ``differentiable``, a number out of range or NaN,
            a duplicate parameter.
        TypeError: a parameter or ``momentum_dtype`` that the kernels do not know.

    The prediction ``steps`` updates ahead is ``W - steps*lr*m_hat/(sqrt(u_hat) + eps)`` with the
    bias corrections of the last step (PipeOptim, 2023); ``laws.Geometric`` is FTPipe's. A parameter
    that was never updated is predicted to stay as it is.
    """

    _rule = rule.ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(momentum_dtype)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )


class AdamW(PredictingOptimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, ``torch.optim.AdamW`` that can predict; see ``Adam``.

    The linear prediction leaves the decay out, the geometric law has it.
    """

    _rule = rule.ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        self._prepare(momentum_dtype)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )


class NAdam(PredictingOptimizer, torch.optim.NAdam):
    """Adam with Nesterov momentum (Dozat, 2016), ``torch.optim.NAdam`` that can predict.

    As ``Adam``, which see; with ``momentum_decay`` (>= 0), the pace at which the momentum grows.
    The prediction goes on with the momentum part of the last step, without a gradient.
    """

    _rule = rule.NADAM

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
