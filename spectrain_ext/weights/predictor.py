"""Predictor: the laws and learning rates of a stage's predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from spectrain_ext.method import Choices
from spectrain_ext.operators.laws import Geometric, Law, Linear, SecondOrder

from .versions import Content


@dataclass(frozen=True, slots=True)
class Difference:
    """W + s*(W - W_before): the last change of the weights, s times over."""

    steps: int


class FutureRates(Protocol):
    """Knows the learning rates of updates to come."""

    def law(self, law: str, version: int, steps: int) -> Law | tuple[Law, ...]:
        """The law over some updates after a version, with their own rates; or a law per group."""


class Predictor:
    """Names what a stage's forwards and backwards compute with.

    Args:
        choices: the method at the stage.
        rates: the present learning rate of every parameter group.
        future: the rates to come, where the method asks for them.
    """

    def __init__(
        self,
        choices: Choices,
        rates: Callable[[], tuple[float, ...]],
        future: FutureRates | None = None,
    ) -> None:
        self._law = choices.law
        self._rates = rates
        self._future = future

    def forward(self, version: int, steps: int, lead: int) -> Content:
        """The forward's prediction; second order has the rate of the step that writes it."""
        if self._law == "second-order":
            return Content(version, SecondOrder(steps, lead))
        return self._content(self._law, version, steps)

    def backward(self, version: int, steps: int) -> Content:
        """The backward's prediction, linear where the method's law is of second order."""
        return self._content("linear" if self._law == "second-order" else self._law, version, steps)

    def _content(self, law: str, version: int, steps: int) -> Content:
        if law == "difference":
            return Content(version, Difference(steps))
        if self._future is not None:
            return Content(version, self._future.law(law, version, steps))
        return Content(version, _named(law, steps), self._rates())


@lru_cache(maxsize=1024)  # a run asks for the same few all the time
def _named(law: str, steps: int) -> Law:
    return Geometric(steps) if law == "geometric" else Linear(steps)
