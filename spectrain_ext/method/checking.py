"""Checking: whether a method can run somewhere, answered without building a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from spectrain_ext.schedule import Replicas

from .choices import Choices, Window, choices_at, places_of
from .registry import find_method
from .value import Method


class Predicting(Protocol):
    """What is asked of an optimizer of ``spectrain_ext.optim``."""

    param_groups: list[dict[str, Any]]

    def check_can_predict(self) -> None:
        """Raise ValueError if there is no momentum to predict with."""


def check(
    method: str | Method,
    stages: int,
    *,
    microbatches: int = 1,
    window: Window = None,
    replicas: Replicas | Sequence[int] | None = None,
    optimizer: Predicting | None = None,
) -> None:
    """Raise what ``Pipeline`` would, were it made with a method and these.

    Args:
        method: a name, or a Method.
        stages: their number.
        microbatches: parts per minibatch.
        window: as for ``Pipeline``.
        replicas: of every stage, None: one.
        optimizer: one like every stage's, with any parameters; None: not looked at.

    Raises:
        ValueError: the method is not defined for these, or contradicts itself.
        TypeError: a value of another type than is asked for.
    """
    method = find_method(method)
    if replicas is not None and not isinstance(replicas, Replicas):
        replicas = Replicas(replicas)
    for place in places_of(method, stages, microbatches, window, replicas):
        choices = choices_at(method, place)
        if optimizer is not None:
            check_optimizer(method, choices, place.stage, optimizer)


def check_optimizer(method: Method, choices: Choices, k: int, optimizer: Predicting) -> None:
    """Refuse stage k's optimizer if the method is not defined for it, or cannot predict with it."""
    if family_of(optimizer) not in method.families:
        raise ValueError(
            f"optimizer: stages[{k}] has {type(optimizer).__name__}, and method {method.name!r} is "
            f"defined for {', '.join(method.families)}"
        )
    if method.direction == "ema":
        for index, group in enumerate(optimizer.param_groups):
            if not group.get("ema", False):
                raise ValueError(
                    f"optimizer: stages[{k}] under method {method.name!r}: parameter group {index} "
                    "has no averaged momentum; pass ema=True to spectrain_ext.optim.SGD"
                )
    if choices.predicts and choices.law != "difference":
        try:
            optimizer.check_can_predict()
        except ValueError as error:
            raise ValueError(
                f"optimizer: stages[{k}] under method {method.name!r}: {error}"
            ) from None


def family_of(optimizer: object) -> str:
    """Which of ``FAMILIES`` an optimizer belongs to, as torch's classes tell."""
    if isinstance(optimizer, torch.optim.NAdam):
        return "nadam"
    if isinstance(optimizer, torch.optim.AdamW):  # an Adam as well
        return "adamw"
    return "adam" if isinstance(optimizer, torch.optim.Adam) else "sgd"
