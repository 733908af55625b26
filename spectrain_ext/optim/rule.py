"""Defines one row per optimizer: how to read its hyperparameters, and which state it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from spectrain_ext.operators.numbers import Adam, Sgd, non_negative

Numbers = Sgd | Adam
Scalars = tuple[float, ...]
Group = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule."""

    numbers: Callable[[Group], Numbers]  # reads a group; step counts are those of the first step
    buffers: tuple[str, ...]  # keys of state shaped like the parameter, as in torch.optim
    columns: tuple[str, ...]  # the arguments of ``Plan`` for those buffers
    # State with one number per parameter, and its value before the first step: ``step``,
    # ``mu_product``, and ``gap_step``, the number of averaged steps. In this order.
    scalars: Mapping[str, float]
    refused: Mapping[str, str]  # unsupported flags of torch, and the reason
    loose: tuple[str, ...] = ()  # keys of state of other shapes, which kernels do not use
    # For a rule of matrices: the key in its groups, and the rule of groups where that is False,
    # which has as many buffers and the same scalars.
    kind: str = ""
    rest: Rule | None = None

    def of(self, group: Group) -> Rule:
        """Return the rule of a parameter group."""
        return self if self.rest is None or group.get(self.kind, True) else self.rest

    @property
    def is_for_matrices(self) -> bool:
        """Whether its hyperparameters are a ``MatrixUpdate``."""
        return self.rest is not None

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.buffers, *self.scalars)

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Keys for the parameters of any group, buffers first."""
        return self.keys if self.rest is None else (*self.buffers, *self.rest.keys, *self.loose)

    def with_averages(self, buffers: tuple[str, ...]) -> Rule:
        """Return the rule extended by the state of a correction."""
        if not buffers:
            return self
        scalars = {**self.scalars, "gap_step": 0.0}
        return replace(self, buffers=(*self.buffers, *buffers), scalars=scalars)

    def read(self, index: int, group: Group) -> Numbers:
        """Return the hyperparameters of a group; ValueError or TypeError names its ``index``."""
        rule = self.of(group)
        for flag, why in rule.refused.items():
            if group.get(flag, False):
                raise ValueError(f"parameter group {index}: {flag}=True is not supported, {why}")
        try:
            return rule.numbers(group)
        except (ValueError, TypeError) as error:
            raise type(error)(f"parameter group {index}: {error}") from error

    def after(self, numbers: Numbers, scalars: Scalars) -> Scalars:
        """Return all scalars after one more step."""
        after: list[float] = []
        for key, value in zip(self.scalars, scalars, strict=True):
            if key == "mu_product" and isinstance(numbers, Adam):
                # In torch's precision of the product.
                product = torch.tensor(value, dtype=scalar_dtype(), device="cpu")
                after.append(product.mul_(numbers.mu(after[0])).item())
            else:
                after.append(value + 1.0)
        return tuple(after)

    def at(self, numbers: Numbers, scalars: Scalars) -> Numbers:
        """Return the hyperparameters of the step that led to these scalars."""
        if isinstance(numbers, Sgd):
            return numbers
        if numbers.momentum_decay is None:
            return replace(numbers, step=int(scalars[0]))
        return replace(numbers, step=int(scalars[0]), mu_product=scalars[1])

    def rests(self, scalars: Scalars) -> bool:
        """Return whether state exists but no step has been made with it."""
        return "step" in self.scalars and scalars[0] < 1.0


def scalar_dtype() -> torch.dtype:
    """Return torch.optim's choice: float32 unless the default dtype is float64."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def rate_of(value: Any) -> Any:
    """Return a learning rate as a number, or as it is if it is on a device."""
    on_device = isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1
    return value.detach() if on_device else plain(value, "lr")


def plain(value: Any, name: str) -> Any:
    """Return a number that may be given as a CPU tensor with one element."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.device.type != "cpu":
        # Reading from a device would synchronize at every step.
        raise ValueError(
            f"{name} must be a number or a CPU tensor with one element, got a tensor of shape "
            f"{tuple(value.shape)} on {value.device}"
        )
    return value.item()


def _sgd_numbers(group: Group) -> Sgd:
    momentum = plain(group["momentum"], "momentum")
    return Sgd(
        rate_of(group["lr"]),
        momentum,
        group["dampening"],
        plain(group["weight_decay"], "weight_decay"),
        bool(group["nesterov"]) and momentum != 0,  # ignored without momentum, as in torch
        bool(group["maximize"]),
        bool(group.get("decoupled_weight_decay", False)),
        bool(group.get("smoothed", False)),
    )


def betas_of(group: Group) -> Any:
    return tuple(plain(beta, f"betas[{i}]") for i, beta in enumerate(group["betas"]))


def _adam_numbers(group: Group) -> Adam:
    return Adam(
        rate_of(group["lr"]),
        betas_of(group),
        plain(group["eps"], "eps"),
        plain(group["weight_decay"], "weight_decay"),
        1,
        bool(group["decoupled_weight_decay"]),
        bool(group["maximize"]),
    )


def _nadam_numbers(group: Group) -> Adam:
    decay = non_negative("momentum_decay", plain(group["momentum_decay"], "momentum_decay"))
    first = replace(_adam_numbers(group), momentum_decay=decay, mu_product=0.0)
    return replace(first, mu_product=first.mu(1))


_REFUSED = {"differentiable": "the step writes behind autograd's back"}
SGD = Rule(_sgd_numbers, ("momentum_buffer",), ("momentum_buffers",), {}, _REFUSED)
ADAM = Rule(
    _adam_numbers,
    buffers=("exp_avg", "exp_avg_sq"),
    columns=("exp_avgs", "exp_avg_sqs"),
    scalars={"step": 0.0},
    refused={
        **_REFUSED,
        "amsgrad": "no kernel keeps the maximum of the second moments",
        "capturable": "the step count lives on the host",
    },
)
NADAM = replace(ADAM, numbers=_nadam_numbers, scalars={"step": 0.0, "mu_product": 1.0})
