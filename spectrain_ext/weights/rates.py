"""Multiplies a scheduler's learning rates by a factor of the stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

Rates = tuple[float, ...]  # of every parameter group
_lr = itemgetter("lr")


class PacedRates(LRScheduler):
    """Sets another scheduler's learning rates, or constant ones, times a factor for each update."""

    def __init__(  # does not call torch's, which would count and set rates itself
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],  # of an update, counted from 0
        scheduler: LRScheduler | None,
    ) -> None:
        self.optimizer = optimizer
        self._factor = factor
        self._scheduler = scheduler
        self._updates = 0
        self._own = rates_of(optimizer)
        self._put()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # An attribute such as ``base_lrs`` has an effect only there.
        inner = self.__dict__.get("_scheduler")
        own = name in self.__dict__ or inner is None or not hasattr(inner, name)
        super().__setattr__(name, value) if own else setattr(inner, name, value)

    def _put(self) -> None:
        factor = self._factor(self._updates)
        self._set([lr * factor for lr in self._own])
        self._given = rates_of(self.optimizer)

    def _set(self, rates: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def step(self, epoch: int | None = None) -> None:
        # A rate that was changed by hand, divided by the factor, is what the scheduler continues
        # from.
        now, factor = rates_of(self.optimizer), self._factor(self._updates)
        self._set(
            [
                own if lr == given or not factor else lr / factor
                for own, given, lr in zip(self._own, self._given, now, strict=True)
            ]
        )
        if self._scheduler is not None:
            self._scheduler.step()
        self._updates += 1
        self._own = rates_of(self.optimizer)
        self._put()

    def get_last_lr(self) -> list[Any]:
        return list(rates_of(self.optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state with this one's entries."""
        inner = {} if self._scheduler is None else self._scheduler.state_dict()
        mine = {"paced_updates": self._updates, "paced_from": list(self._own)}
        return {**inner, **mine}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and set the rates; without own entries, count updates from 0."""
        inner = dict(state_dict)
        self._updates = int(inner.pop("paced_updates", 0))
        self._own = tuple(map(float, inner.pop("paced_from", rates_of(self.optimizer))))
        if self._scheduler is not None:
            self._scheduler.load_state_dict(inner)
        self._put()


def paced(
    factory: Callable[[Any], LRScheduler | None], factor: Callable[[int], float] | None
) -> Callable[[Any], LRScheduler | None]:
    """Return a factory of schedulers with this factor; None: the same factory."""
    if factor is None:
        return factory

    def made(optimizer: Any) -> LRScheduler:
        for index, group in enumerate(optimizer.param_groups):
            if group.get("lr") is None:
                raise ValueError(
                    f"optimizer: group {index} of a {type(optimizer).__name__} has no learning "
                    "rate (lr), and this method divides it by the delay; give it one, or take more "
                    "microbatches or another method"
                )
        return PacedRates(optimizer, factor, factory(optimizer))

    return made


def rates_of(optimizer: torch.optim.Optimizer) -> Rates:
    """Return the current learning rate of every parameter group, 0 if it has none or None."""
    try:
        return tuple(map(float, map(_lr, optimizer.param_groups)))
    except (KeyError, TypeError):  # TypeError: Adafactor's None, which it computes itself
        rates = (group.get("lr") for group in optimizer.param_groups)
        return tuple(0.0 if rate is None else float(rate) for rate in rates)
