"""The optimizer and the learning rates of a preset, from its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from spectrain_ext import optim
from spectrain_ext.extras import require
from spectrain_ext.method import Method
from spectrain_ext.optim import PredictingOptimizer

from .settings import TrainSettings


def make_optimizer(
    settings: TrainSettings, method: Method, parameters: Iterable[nn.Parameter]
) -> PredictingOptimizer:
    """Return the optimizer that the settings name.

    A method whose momentum is an average gets an average, and a learning rate larger by
    ``1 / (1 - momentum)``, with which an average makes the updates that a sum makes.
    """
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer == "sgd":
        ema = method.direction == "ema" and settings.momentum < 1
        return optim.SGD(
            parameters,
            lr=lr / (1 - settings.momentum) if ema else lr,
            momentum=settings.momentum,
            weight_decay=decay,
            nesterov=settings.nesterov,
            ema=ema,
        )
    betas = settings.betas
    if settings.optimizer == "adam":
        return optim.Adam(parameters, lr=lr, betas=betas, weight_decay=decay)
    if settings.optimizer == "adamw":
        return optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=decay)
    return optim.NAdam(
        parameters, lr=lr, betas=betas, weight_decay=decay, decoupled_weight_decay=True
    )


def make_scheduler(
    settings: TrainSettings, updates: int
) -> Callable[[PredictingOptimizer], LambdaLR] | None:
    """Return what makes a stage's learning-rate scheduler; None: the rate is constant.

    The rate rises linearly over ``warmup`` updates, then stays or falls as half a cosine to 0 at
    the end of all ``updates``.
    """
    if settings.lr_schedule == "constant" and not settings.warmup:
        return None
    factor = factor_of(settings, updates)
    return lambda optimizer: LambdaLR(optimizer, factor)


def factor_of(settings: TrainSettings, updates: int) -> Callable[[int], float]:
    """What the learning rate is multiplied by at each of so many updates."""

    def factor(update: int) -> float:
        if update < settings.warmup:
            return (update + 1) / (settings.warmup + 1)
        if settings.lr_schedule == "constant":
            return 1.0
        done = (update - settings.warmup) / max(1, updates - settings.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


class Together(torch.optim.Optimizer):
    """Several optimizers as one: the groups of all."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        groups = iter(self.param_groups)
        for part in parts:
            part.param_groups = [next(groups) for _ in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def make_any_optimizer(
    settings: TrainSettings, method: Method, hidden: set[nn.Parameter], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The settings' optimizer; muon and soap are for hidden matrices, AdamW for the rest."""
    if settings.optimizer not in ("muon", "soap"):
        return make_optimizer(settings, method, params)
    matrices = [p for p in params if p in hidden]
    rest = [p for p in params if p not in hidden]
    made: list[torch.optim.Optimizer] = []
    if matrices and settings.optimizer == "muon":
        decay = settings.weight_decay
        made += [torch.optim.Muon(matrices, settings.lr, decay, adjust_lr_fn="match_rms_adamw")]
    elif matrices:
        require(
            "pytorch_optimizer",
            "SOAP comes with pytorch-optimizer",
            "pip install pytorch-optimizer",
        )
        from pytorch_optimizer import SOAP  # type: ignore[import-not-found]

        made += [SOAP(matrices, lr=settings.lr, weight_decay=settings.weight_decay)]
    if rest:
        made += [torch.optim.AdamW(rest, lr=settings.lr, weight_decay=settings.weight_decay)]
    return Together(*made)
