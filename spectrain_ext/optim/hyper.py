"""The numbers of one parameter group, read and checked before anything is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Hyper(NamedTuple):
    """What one step of one parameter group computes with, as plain numbers."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


def read_hyper(index: int, group: Mapping[str, Any]) -> Hyper:
    """Return the numbers of parameter group ``index``; ValueError or TypeError names a bad one."""
    if group.get("differentiable", False):
        raise ValueError(
            f"parameter group {index}: differentiable=True is not supported, "
            "the step writes behind autograd's back"
        )
    momentum = _number(index, group, "momentum", least=0.0)
    dampening = _number(index, group, "dampening", least=None)
    if group["nesterov"] and momentum != 0.0 and dampening != 0.0:
        raise ValueError(
            f"parameter group {index}: Nesterov momentum needs dampening 0, got {dampening}"
        )
    return Hyper(
        lr=_number(index, group, "lr", least=0.0),
        momentum=momentum,
        dampening=dampening,
        weight_decay=_number(index, group, "weight_decay", least=0.0),
        nesterov=bool(group["nesterov"]) and momentum != 0.0,
        maximize=bool(group["maximize"]),
    )


def read_steps(steps: float) -> float:
    """Return ``steps`` as a float; ValueError unless it is finite and not negative."""
    value = float(steps)
    if not math.isfinite(value) or value < 0.0:
        raise ValueError(f"steps must be a finite number >= 0, got {steps}")
    return value


def _number(index: int, group: Mapping[str, Any], name: str, *, least: float | None) -> float:
    value = group[name]
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type != "cpu":
            # Reading a number from a device would make the host wait for it at every step.
            raise ValueError(
                f"{name} of parameter group {index} must be a number or a CPU tensor with one "
                f"element, got a tensor of shape {tuple(value.shape)} on {value.device}"
            )
        value = value.item()
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} of parameter group {index} must be a number, got {type(value).__name__}"
        ) from error
    if not math.isfinite(number) or (least is not None and number < least):
        wanted = "a finite number" if least is None else f"a finite number >= {least:g}"
        raise ValueError(f"{name} of parameter group {index} must be {wanted}, got {number}")
    return number
