"""Defines how replicas that train on their own gradients are averaged, as values.

x_i are the true weights of replica i, all of one stage's in a row; r is the number of replicas.
Sums over replicas are made in their order, so that all replicas get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spectrain_ext.operators.numbers import non_negative

#: Begins to send a message to all replicas, which may then be overwritten; the returned function
#: waits for theirs, in order.
Exchange = Callable[[Tensor], Callable[[], Sequence[Tensor]]]


class Averaging(Protocol):
    """A way to average: a value, the same on all replicas."""

    __slots__ = ()

    def begin(self, weights: Tensor, exchange: Exchange, stage: int) -> Averager:
        """Return one replica's part, from these one-dimensional weights of its own on."""


class Averager(Protocol):
    """One replica's part; all replicas call the same methods in the same order."""

    def before(self, weights: Tensor) -> None:
        """Prepare for an update of these weights, without waiting."""

    def made(self, weights: Tensor) -> None:
        """Take the update's result, without waiting."""

    def after(self, weights: Tensor) -> Tensor | None:
        """Wait for the others and return the new weights; None: they stay the same.

        May write the given tensor.
        """

    def average(self, weights: Tensor) -> Callable[[], Tensor]:
        """Return a call that waits for the others' weights and returns what is evaluated."""

    def state(self) -> tuple[dict[str, Tensor], int]:
        """Return all that it keeps, and its updates so far."""

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Restore that state; ValueError if it does not fit."""


@dataclass(frozen=True, slots=True)
class Elastic(Averaging):
    """Elastic averaging: a common centre attracts the replicas, and they attract it.

    x_i <- x_i + u_i - a*(x_i - x) and x <- x + a*sum(x_i - x), with x_i and x before the update on
    the right. u_i is the update of replica i's optimizer, -lr*g_i for plain SGD. The centre x
    starts as the weights and is what is evaluated. Elastic averaging SGD with period 1 (Zhang,
    Choromanska, LeCun, NeurIPS 2015), the base of AvgPipe (Chen et al., PPoPP 2023).

    Attributes:
        strength: a, at least 0; 0 keeps the replicas independent. At most 1/r in the papers.

    Example:
        >>> averaging = st.averaging.Elastic(0.4)  # passes=[st.passes.AverageWeights(averaging)]
        >>> averaging.strength
        0.4
    """

    strength: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", float(non_negative("strength", self.strength)))

    def begin(self, weights: Tensor, exchange: Exchange, stage: int) -> Averager:
        return _Elastic(self.strength, weights.clone(), exchange)


class _Elastic:
    def __init__(self, strength: float, centre: Tensor, exchange: Exchange) -> None:
        self._strength, self._centre, self._exchange = strength, centre, exchange
        self._updates = 0

    def before(self, weights: Tensor) -> None:
        self._pull = (weights - self._centre).mul_(self._strength)
        self._pulls = self._exchange(self._pull)

    def made(self, weights: Tensor) -> None: ...

    def after(self, weights: Tensor) -> Tensor | None:
        self._centre += summed(self._pulls())
        self._updates += 1
        return weights.sub_(self._pull)

    def average(self, weights: Tensor) -> Callable[[], Tensor]:
        return lambda: self._centre

    def state(self) -> tuple[dict[str, Tensor], int]:
        return {"centre": self._centre}, self._updates

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        self._centre.copy_(fitting(tensors, "centre", self._centre))
        self._updates = updates


def fitting(tensors: Mapping[str, Tensor], key: str, like: Tensor) -> Tensor:
    """Return the tensor of a key; ValueError unless it has that shape and kind of numbers."""
    found = tensors.get(key)
    if found is None or found.shape != like.shape or found.is_complex() != like.is_complex():
        got = "none" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
        wanted = f"{like.dtype} of shape {tuple(like.shape)}"
        raise ValueError(f"averaging: expected {key!r}, {wanted}, got {got}")
    return found


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Sum in order, so that all replicas get the same bits however they were sent."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
