"""Makes the optimizer and the learning-rate scheduler of the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from spectrain_ext import optim
from spectrain_ext.method import Method
from spectrain_ext.optim import PredictingOptimizer

from .settings import TrainSettings


def make_optimizer(
    settings: TrainSettings, method: Method, parameters: Iterable[Any]
) -> PredictingOptimizer:
    """Return the optimizer that the settings name.

    For a method whose momentum is of smoothed gradients, the learning rate is larger by
    ``1 / (1 - momentum)``, which makes the same updates as a sum of gradients.
    """
    lr, decay = settings.lr, settings.weight_decay
    if not settings.decays_vectors:
        parameters = _decayed(parameters)
    if settings.optimizer == "sgd":
        smoothed = method.smoothed and settings.momentum < 1
        return optim.SGD(
            parameters,
            lr=lr / (1 - settings.momentum) if smoothed else lr,
            momentum=settings.momentum,
            weight_decay=decay,
            nesterov=settings.nesterov,
            smoothed=smoothed,
        )
    betas = settings.betas
    if settings.optimizer == "lion":
        return optim.Lion(parameters, lr=lr, weight_decay=decay)
    state = None if settings.state_dtype is None else getattr(torch, settings.state_dtype)
    if settings.optimizer == "adam":
        return optim.Adam(parameters, lr=lr, betas=betas, weight_decay=decay, state_dtype=state)
    if settings.optimizer == "adamw":
        return optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=decay, state_dtype=state)
    return optim.NAdam(
        parameters, lr=lr, betas=betas, weight_decay=decay, decoupled_weight_decay=True
    )


def make_scheduler(
    settings: TrainSettings, updates: int
) -> Callable[[PredictingOptimizer], LambdaLR] | None:
    """Return a factory of a stage's learning-rate scheduler, or None for a constant rate.

    The rate rises linearly over ``warmup`` updates, then stays constant or falls as a half cosine
    to ``lr_floor`` times its highest value at the end of all ``updates``.
    """
    if settings.lr_schedule == "constant" and not settings.warmup:
        return None

    def factor(update: int) -> float:
        if update < settings.warmup:
            return (update + 1) / (settings.warmup + 1)
        if settings.lr_schedule == "constant":
            return 1.0
        done = (update - settings.warmup) / max(1, updates - settings.warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return share + (1 - share) * settings.lr_floor

    return lambda optimizer: LambdaLR(optimizer, factor)


def make_any_optimizer(
    settings: TrainSettings, method: Method, hidden: set[Tensor], params: list[nn.Parameter]
) -> PredictingOptimizer:
    """Return the settings' optimizer; muon and basis-rotation use AdamW outside hidden matrices."""
    if settings.optimizer == "muon":
        if settings.model == "speedrun":
            return _raced(settings, hidden, params)
        adamw = {"betas": settings.betas, "weight_decay": settings.weight_decay}
        rates = settings.lr, settings.weight_decay
        fit = "match_rms_adamw"
        if not settings.decays_vectors:
            groups = [{"params": [p for p in params if p in hidden], "use_muon": True}]
            rest = _decayed(p for p in params if p not in hidden)
            groups += [{**adamw, **group, "use_muon": False} for group in rest]
            return optim.Muon(groups, *rates, adjust_lr_fn=fit)
        return optim.Muon(params, *rates, adjust_lr_fn=fit, hidden=hidden, adamw=adamw)
    if settings.optimizer == "soap":
        return optim.SOAP(params, settings.lr, weight_decay=settings.weight_decay)
    if settings.optimizer == "basis-rotation":  # as in its public code
        lr, decay = settings.lr, settings.weight_decay
        return optim.SOAP(params, lr, weight_decay=decay, precondition_frequency=10, hidden=hidden)
    return make_optimizer(settings, method, params)


def _decayed(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups of matrices, and of the rest without weight decay."""
    params = list(parameters)
    matrices, rest = ([p for p in params if (p.dim() > 1) is is_one] for is_one in (True, False))
    return [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]


#: Rates of Protocol NanoGPT's baselines, divided by 0.025, the rate of their hidden matrices.
_EMBEDDING, _HEAD, _VECTORS = 0.7 / 0.025, 0.004 / 0.025, 0.015 / 0.025


def _raced(
    settings: TrainSettings, hidden: set[Tensor], params: list[nn.Parameter]
) -> PredictingOptimizer:
    """Use Muon for matrices of blocks and AdamW for the rest, with those baselines' settings."""
    lr = settings.lr
    rates = {p: _VECTORS if p.dim() < 2 else _HEAD for p in params if p not in hidden}
    if params[0] in rates and params[0].dim() == 2:  # the stage begins with the embedding
        rates[params[0]] = _EMBEDDING
    rest = {"use_muon": False, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.001}
    groups = [{"params": [p for p in params if p in hidden], "use_muon": True}]
    for rate in dict.fromkeys(rates.values()):
        mine = [p for p, its in rates.items() if its == rate]
        groups.append({"params": mine, "lr": rate * lr, **rest})
    return optim.Muon(groups, lr, settings.weight_decay, momentum=0.95, adjust_lr_fn="original")
