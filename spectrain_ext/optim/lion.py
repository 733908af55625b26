"""Implements Lion with predictions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from spectrain_ext.operators.calls import Role
from spectrain_ext.operators.numbers import LionNumbers

from .base import PredictingOptimizer
from .state import Group, Rule, betas_of, plain, rate_of


def _lion_numbers(group: Group) -> LionNumbers:
    return LionNumbers(
        rate_of(group["lr"]),
        betas_of(group),
        plain(group["weight_decay"], "weight_decay"),
        bool(group["maximize"]),
    )


class Lion(PredictingOptimizer):
    """Lion (Chen et al., arXiv 2302.06675), which can predict weights some updates ahead.

    One state instead of Adam's two, and updates of the same size for all weights:
    ``W -= lr*(sign(beta1*m + (1 - beta1)*g) + weight_decay*W)``, then
    ``m = beta2*m + (1 - beta2)*g``. Its rates are 3 to 10 times smaller than AdamW's, its weight
    decay as many times larger. A step is one kernel launch per device for all groups.

    Args:
        params: parameters, named parameters or parameter groups, as for ``SGD``.
        lr: learning rate (>= 0), as for ``SGD``.
        betas: decay of the average in an update's direction, and of the average itself.
        weight_decay: decoupled decay (>= 0).
        maximize: ascend instead of descend.
        state_dtype: dtype of the average, as for ``Adam``.

    Raises:
        ValueError: a number out of range or NaN, a duplicate parameter.
        TypeError: a parameter's dtype or ``state_dtype`` is not supported.

    The prediction ``steps`` updates ahead is ``W - steps*lr*sign(m)/2``: the next direction needs
    the next gradient, and about half of the average's signs come true. State dicts have the keys of
    the common implementations (``exp_avg``).

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = st.optim.Lion([weight], lr=0.25)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> with optimizer.predicted(steps=2):
        ...     print(f"{weight.item():.2f}")
        0.50
    """

    _rule = Rule(_lion_numbers, ("exp_avg",), {"exp_avgs": Role.MOMENTUM}, {}, {})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state_dtype=state_dtype)
