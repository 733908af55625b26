"""ComingRates: the learning rates of updates to come, from a scheduler that runs ahead."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from spectrain_ext.operators.laws import FutureRates, Law

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

Rates = tuple[float, ...]  # of every parameter group
_lr = itemgetter("lr")


class _Shadow(torch.optim.Optimizer):
    """Parameter groups for a scheduler to work on, without parameters that matter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> Any:
        """Nothing; schedulers want it called."""


class ComingRates:
    """Tells which rates the next updates of one stage will have.

    A second scheduler, made by the same factory, works on groups of its own and is stepped as far
    ahead as anybody asks. Whoever changes a learning rate by hand puts it off the track: it then
    takes the state of the real one again. Beyond a schedule's end its last rates go on.

    Args:
        optimizer: the stage's, before it gets its scheduler.
        factory: makes a scheduler; None where rates are constant.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factory: Callable[[Any], LRScheduler] | None,
    ) -> None:
        self._optimizer = optimizer
        self._shadow = _Shadow(optimizer)
        self._ahead = None if factory is None else factory(self._shadow)
        self._real: LRScheduler | None = None
        self._version = 0
        self._known: deque[Rates] = deque()  # of the newest version and of those after it
        self._ended = False

    def follow(self, scheduler: LRScheduler | None) -> None:
        """Give it the scheduler that it runs ahead of."""
        self._real = scheduler

    def begin(self) -> None:
        """A run begins: the present rates are those of version 0."""
        self._version = 0
        self._restart()

    def advance(self) -> None:
        """An update has been made, and the scheduler stepped."""
        self._version += 1
        self._rates(1)
        self._known.popleft()

    def law(self, law: str, version: int, horizon: int) -> Law | tuple[Law, ...]:
        """The law over some updates after a version: the newest one, or the one after it."""
        if not self._known or self._known[0] != rates_of(self._optimizer):
            self._restart()
        ahead = version - self._version
        rates = [self._rates(ahead + n) for n in range(horizon)]
        laws = tuple(FutureRates(group, law) for group in zip(*rates, strict=True))
        return laws[0] if all(other == laws[0] for other in laws) else laws

    def _restart(self) -> None:
        self._ended = False
        self._known.clear()
        self._known.append(rates_of(self._optimizer))
        if self._ahead is not None and self._real is not None:
            self._ahead.load_state_dict(copy.deepcopy(self._real.state_dict()))
        groups = zip(self._shadow.param_groups, self._optimizer.param_groups, strict=True)
        for mine, group in groups:
            mine.update({key: value for key, value in group.items() if key != "params"})

    def _rates(self, ahead: int) -> Rates:
        while len(self._known) <= ahead:
            self._known.append(self._next())
        return self._known[ahead]

    def _next(self) -> Rates:
        if self._ahead is not None and not self._ended:
            self._shadow.step()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._ahead.step()
            except (ValueError, IndexError):  # some end with an error
                self._ended = True
                return self._known[-1]
        return rates_of(self._shadow)


def rates_of(optimizer: torch.optim.Optimizer) -> Rates:
    """The present learning rate of every parameter group; 0 where an optimizer has none."""
    try:
        return tuple(map(float, map(_lr, optimizer.param_groups)))
    except KeyError:
        return tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups)
