"""Implements torch.optim's SGD, Adam, AdamW and NAdam with predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.calls import Role
from spectrain_ext.operators.numbers import AdamNumbers, SgdNumbers, non_negative

from .base import PredictingOptimizer
from .state import Group, Rule, betas_of, plain, rate_of

# Options of SGD that torch's does not have.
_EXTRAS = ("smoothed", "decoupled_weight_decay")


def _sgd_numbers(group: Group) -> SgdNumbers:
    momentum = plain(group["momentum"], "momentum")
    return SgdNumbers(
        rate_of(group["lr"]),
        momentum,
        group["dampening"],
        plain(group["weight_decay"], "weight_decay"),
        bool(group["nesterov"]) and momentum != 0,  # ignored without momentum, as in torch
        bool(group["maximize"]),
        bool(group.get("decoupled_weight_decay", False)),
        bool(group.get("smoothed", False)),
    )


def _adam_numbers(group: Group) -> AdamNumbers:
    return AdamNumbers(
        rate_of(group["lr"]),
        betas_of(group),
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


_REFUSED = {"differentiable": "the step writes behind autograd's back"}
_MOMENTUM = {"momentum_buffers": Role.MOMENTUM}
_SGD = Rule(_sgd_numbers, ("momentum_buffer",), _MOMENTUM, {}, _REFUSED)
ADAM = Rule(
    _adam_numbers,
    buffers=("exp_avg", "exp_avg_sq"),
    columns={"exp_avgs": Role.MOMENTUM, "exp_avg_sqs": Role.SECOND},
    scalars={"step": 0.0},
    refused={
        **_REFUSED,
        "amsgrad": "no kernel keeps the maximum of the second moments",
    },
)
_NADAM = replace(
    ADAM,
    numbers=_nadam_numbers,
    scalars={"step": 0.0, "mu_product": 1.0},
    refused={**ADAM.refused, "capturable": "the product of its momenta lives on the host"},
)


def _passed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a constructor's ``locals()`` without what is not an argument."""
    return {name: arguments[name] for name in arguments if name not in ("self", "__class__")}


class SGD(PredictingOptimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum, which can predict weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are those of ``torch.optim.SGD``;
    checkpoints load in both directions. A step is one kernel launch per device for all groups (two
    if some groups have momentum and others do not). The arithmetic is float64 for float64 weights
    and float32 for all others. 16-bit weights and momentum are rounded once per step, while torch's
    unfused step rounds after every operation.

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
        foreach, fused: accepted for compatibility, without effect.
        differentiable: must be False.
        state_dtype: dtype of the momentum buffers; None means the parameter's. 16-bit parameters
            may have ``torch.float32`` momentum, float32 parameters ``torch.bfloat16``.
        smoothed: the momentum is the SpecTrain paper's smoothed gradient,
            ``v = momentum*v + (1 - momentum)*g`` from ``v = 0``; needs ``0 < momentum < 1`` and no
            dampening.
        decoupled_weight_decay: multiply the weights by ``1 - lr*weight_decay`` before each step
            instead of adding an L2 penalty to the gradient.

    ``smoothed`` and ``decoupled_weight_decay`` can be set per parameter group. They are keys of the
    groups only if one of them is used.

    Raises:
        ValueError: ``differentiable=True``, a number out of range or NaN, a duplicate parameter.
        TypeError: a parameter's dtype or ``state_dtype`` is not supported.

    The prediction ``steps`` updates ahead is ``W - lr*steps*v``, with v the momentum buffer
    (SpecTrain, arXiv 1809.02839, equation 4). A parameter without a momentum buffer is predicted to
    stay unchanged.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> for _ in range(3):
        ...     with optimizer.predicted(steps=2):  # forward and backward with predicted weights
        ...         model(torch.ones(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    _rule = _SGD

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
        state_dtype: torch.dtype | None = None,
        smoothed: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        arguments = _passed(locals())
        # Only where they are asked for: by default the groups' keys are torch's.
        asked = [key for key in _EXTRAS if arguments.pop(key)]
        super().__init__(**arguments)
        self.defaults.update(dict.fromkeys(asked, True))
        self._complete_groups()
        for index in range(len(self.param_groups)):
            self.stepper.check_group(index)

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
    """Adam, which can predict weights some updates ahead.

    Arguments, parameter groups, ``state_dict`` and results are those of ``torch.optim.Adam``;
    checkpoints load in both directions. A step is one kernel launch per device for all groups. The
    arithmetic is float64 for float64 weights and float32 for all others. 16-bit weights and moments
    are rounded once per step, while torch's unfused step rounds after every operation.

    Args:
        params: parameters, named parameters or parameter groups: float32, float64, float16 or
            bfloat16, strided, on any devices.
        lr: learning rate (>= 0), a number or a CPU tensor with one element, or one on the device of
            all parameters, which kernels read when they run.
        betas: decay of the first and of the second moment, each in [0, 1).
        eps: added to the root of the second moment (>= 0).
        weight_decay: L2 penalty, or decoupled decay (>= 0).
        amsgrad, differentiable: must be False.
        foreach, fused: accepted for compatibility, without effect.
        capturable: count steps on the parameters' device, where kernels read them. A CUDA graph may
            then capture the step, after two steps with the same gradients; numbers and bits are
            the same. ``GradScaler`` leaves unscaling and skipping to the step, without waiting.
        maximize: ascend instead of descend.
        decoupled_weight_decay: selects AdamW.
        state_dtype: dtype of the moments; None means the parameter's. 16-bit parameters may have
            ``torch.float32`` moments, float32 parameters ``torch.bfloat16`` ones, which take 4
            bytes less each. A bfloat16 second moment is rounded stochastically, with the step's
            number as the seed, if betas[1] is above 1 - 2^-8; a first moment never, so betas[0]
            must not be. Predictions use the rounded moments.

    Raises:
        ValueError: ``amsgrad`` or ``differentiable``, a number out of range or NaN, a duplicate
            parameter.
        TypeError: a parameter's dtype or ``state_dtype`` is not supported.

    The prediction ``steps`` updates ahead is ``W - steps*lr*m_hat/(sqrt(u_hat) + eps)`` with the
    bias corrections of the last step (PipeOptim, 2023); ``laws.Geometric`` is FTPipe's. A parameter
    that was never updated is predicted to stay unchanged.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = st.optim.Adam([weight], lr=0.25)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> with optimizer.predicted(steps=2):
        ...     print(f"{weight.item():.2f}")
        0.25
    """

    _rule = ADAM

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
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(**_passed(locals()))


class AdamW(PredictingOptimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, ``torch.optim.AdamW`` with predictions; see ``Adam``.

    The linear prediction ignores the decay; the geometric law includes it.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = st.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    """

    _rule = ADAM

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
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(**_passed(locals()))


class NAdam(PredictingOptimizer, torch.optim.NAdam):
    """Adam with Nesterov momentum (Dozat, 2016), ``torch.optim.NAdam`` with predictions.

    See ``Adam`` for the arguments; ``momentum_decay`` (>= 0) sets how fast the momentum grows. The
    prediction continues the momentum part of the last step, without a gradient.

    Example:
        >>> optimizer = st.optim.NAdam(nn.Linear(4, 2).parameters(), lr=2e-3, momentum_decay=4e-3)
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
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(**_passed(locals()))
