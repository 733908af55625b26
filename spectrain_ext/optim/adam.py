"""Adam, AdamW and NAdam: torch.optim's, with one fused pass per step, and predictions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.numbers import Adam as AdamNumbers
from spectrain_ext.operators.numbers import non_negative

from .base import PredictingOptimizer
from .rule import REFUSED, Group, Rule, plain, rate


def _adam_numbers(group: Group) -> AdamNumbers:
    return AdamNumbers(
        rate(group["lr"]),
        tuple(plain(beta, f"betas[{i}]") for i, beta in enumerate(group["betas"])),
        plain(group["eps"], "eps"),
        plain(group["weight_decay"], "weight_decay"),
        1,
        bool(group["decoupled_weight_decay"]),
        bool(group["maximize"]),
    )


def _nadam_numbers(group: Group) -> AdamNumbers:
    decay = non_negative("momentum_decay", plain(group["momentum_decay"], "momentum_decay"))
    first = replace(_adam_numbers(group), momentum_decay=decay, mu_product=0.0)
    return replace(first, mu_product=first.mu(1))


_ADAM = Rule(
    _adam_numbers,
    buffers=("exp_avg", "exp_avg_sq"),
    columns=("exp_avgs", "exp_avg_sqs"),
    scalars={"step": 0.0},
    refused={
        **REFUSED,
        "amsgrad": "no kernel keeps the maximum of the second moments",
        "capturable": "the step count lives on the host",
    },
)
_NADAM = replace(_ADAM, numbers=_nadam_numbers, scalars={"step": 0.0, "mu_product": 1.0})


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

    _rule = _ADAM

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

    _rule = _ADAM

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

    _rule = _NADAM

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
