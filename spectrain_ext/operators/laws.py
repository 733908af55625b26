"""Laws: how the weights some updates ahead follow from the weights, the momentum and the gradient.

A number of steps given to an operator is the linear law. Notation: W the weights, v
the momentum buffer (m, u for Adam), d the gradient with weight decay, s the horizon in updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, repeat
from typing import Protocol, SupportsFloat, TypeAlias

from spectrain_ext._C import MAX_TERMS

from .expressions import Expression
from .numbers import Adam as Adam
from .numbers import Sgd as Sgd
from .numbers import Term as Term
from .numbers import horizon, non_negative, number


class Law(Protocol):
    """A prediction law: the terms that take the present weights to the predicted ones."""

    __slots__ = ()

    def sgd(self, numbers: Sgd) -> list[Term]:
        """Terms under SGD; none where the prediction is the weights themselves."""

    def adam(self, numbers: Adam) -> list[Term]:
        """Terms under Adam, AdamW and NAdam."""


Horizon: TypeAlias = SupportsFloat | Law
Horizons: TypeAlias = Horizon | tuple[Horizon, ...]  # for all parameter groups, or for each


@dataclass(frozen=True, slots=True)
class Linear(Law):
    """The last update, s times over: W - s*lr*v (SpecTrain, arXiv 1809.02839).

    Under Adam W - s*lr*m_hat/(sqrt(u_hat) + eps), without the decay term (PipeOptim, 2023).
    """

    steps: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", horizon("steps", self.steps))

    def sgd(self, numbers: Sgd) -> list[Term]:
        return [Term(1.0, numbers.lr * self.steps)] if self.steps else []

    def adam(self, numbers: Adam) -> list[Term]:
        if not self.steps:
            return []
        rate = numbers.rate(numbers.lr)
        return [Term(1.0, self.steps * rate, 0.0, numbers.root(numbers.step))]


@dataclass(frozen=True, slots=True)
class Geometric(Law):
    """s more updates whose gradients are zero (FTPipe's msnag, 2021).

    SGD: W - lr*v*(mu - mu^(s+1))/(1 - mu); with an L2 penalty, decoupled decay or Nesterov momentum
    the exact continuation, for a whole s. Adam: for i = 1..s with bias corrections of step t+i,
    p -= lr*(beta1^i*m/(1 - beta1^(t+i))) / (sqrt(u)/sqrt(1 - beta2^(t+i)) + eps), AdamW with
    ``p *= 1 - lr*decay`` before each; the second moment is not decayed.
    """

    steps: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", horizon("steps", self.steps))

    def sgd(self, numbers: Sgd) -> list[Term]:
        if not self.steps:
            return []
        mu = numbers.momentum
        if numbers.weight_decay:
            return [_continuation(numbers, _whole(self.steps, "weight decay"))]
        reach = self.steps if mu == 1.0 else (mu - mu ** (self.steps + 1.0)) / (1.0 - mu)
        return [Term(1.0, numbers.lr * reach * (mu if numbers.nesterov else 1.0))]

    def adam(self, numbers: Adam) -> list[Term]:
        return _adam_loop(numbers, _whole(self.steps, "Adam"), repeat(numbers.lr))


@dataclass(frozen=True, slots=True)
class FutureRates(Law):
    """A prediction with the learning rates that the coming updates will have, one for each.

    ``law="linear"``: W - sum(lr_i)*v. ``law="geometric"``: zero-gradient updates, as `Geometric`.
    """

    rates: Sequence[float]
    law: str = "linear"

    def __post_init__(self) -> None:
        if not isinstance(self.rates, Iterable) or isinstance(self.rates, str):
            raise TypeError(f"rates: expected a sequence of numbers, got {self.rates!r}")
        rates = tuple(non_negative(f"rates[{i}]", r) for i, r in enumerate(self.rates))
        object.__setattr__(self, "rates", rates)
        if self.law not in ("linear", "geometric"):
            raise ValueError(f"law: expected 'linear' or 'geometric', got {self.law!r}")

    def sgd(self, numbers: Sgd) -> list[Term]:
        if not self.rates:
            return []
        if self.law == "linear":
            return [Term(1.0, _total(self.rates))]
        matrix = _IDENTITY
        for rate in self.rates:
            matrix = _times(_update(numbers, rate), matrix)
        return [Term(matrix[0], -matrix[1])]

    def adam(self, numbers: Adam) -> list[Term]:
        if not self.rates:
            return []
        if self.law == "linear":
            rate = _total(map(numbers.rate, self.rates))
            return [Term(1.0, rate, 0.0, numbers.root(numbers.step))]
        return _adam_loop(numbers, len(self.rates), self.rates)


@dataclass(frozen=True, slots=True)
class SecondOrder(Law):
    """The momentum extrapolated by its last change as well.

    W - lr*[(D + lead)*v + D*(D+1)/2*(v - v_prev)] with D = delay; lead >= -D. After an update
    v - v_prev = (gain*d - (1 - mu)*v)/mu, so that the last change costs no state: only the step
    itself, which has the gradient, can write this prediction. On the first update v_prev is 0
    (a sum) or the gradient itself (EMA); dampening has no first change of its own.
    """

    delay: float
    lead: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", non_negative("delay", self.delay))
        object.__setattr__(self, "lead", number("lead", self.lead))
        if type(self.lead) is type(self.delay) is float and self.lead < -self.delay:
            raise ValueError(f"lead: expected at least -delay, {-self.delay}, got {self.lead}")

    def _coefficients(self, mu: float, gain: float) -> tuple[float, float]:
        change = self.delay * (self.delay + 1.0) / 2.0
        return self.delay + self.lead - change * (1.0 - mu) / mu, change * gain / mu

    def sgd(self, numbers: Sgd) -> list[Term]:
        if not self.delay and not self.lead:
            return []
        if not numbers.momentum:
            raise ValueError("momentum: a second-order prediction needs momentum > 0")
        momentum, gradient = self._coefficients(numbers.momentum, numbers.gain)
        return [Term(1.0, numbers.lr * momentum, numbers.lr * gradient * numbers.trust)]

    def adam(self, numbers: Adam) -> list[Term]:
        if not self.delay and not self.lead:
            return []
        beta1 = numbers.betas[0]
        if beta1 == 0.0:
            raise ValueError("betas[0]: a second-order prediction needs momentum > 0")
        momentum, gradient = self._coefficients(beta1, 1.0 - beta1)
        rate = numbers.rate(numbers.lr)
        return [Term(1.0, rate * momentum, rate * gradient, numbers.root(numbers.step))]


_linear = lru_cache(maxsize=256)(Linear)  # a training loop asks for the same few at every step


def as_laws(steps: Horizons, n_groups: int, name: str = "steps") -> Sequence[Law]:
    """The law of every parameter group: one for all of them, or a tuple with one for each."""
    if not isinstance(steps, tuple):
        return [as_law(steps, name)] * n_groups
    if len(steps) != n_groups:
        raise ValueError(f"{name}: expected one for each of {n_groups} groups, got {len(steps)}")
    return [as_law(each, f"{name}[{i}]") for i, each in enumerate(steps)]


def as_law(steps: Horizon, name: str = "steps") -> Law:
    """A number of steps as the linear law."""
    if isinstance(steps, (int, float)):
        return _linear(horizon(name, steps))
    if hasattr(type(steps), "sgd"):
        return steps  # type: ignore[return-value]
    return Linear(horizon(name, steps))  # type: ignore[arg-type]


def terms_of(law: Law, numbers: Sgd | Adam) -> list[Term]:
    """The terms of a law under a rule; under SGD there is at most one."""
    if isinstance(numbers, Adam):
        return law.adam(numbers)
    terms = law.sgd(numbers)
    if len(terms) > 1:
        raise ValueError(f"steps: expected at most one term under SGD, {law} gave {len(terms)}")
    return terms


def needs_momentum(law: Law) -> bool:
    """Whether a law asks for more of SGD than its learning rate."""
    return not (isinstance(law, Linear) or (isinstance(law, FutureRates) and law.law == "linear"))


def _total(rates: Iterable[float]) -> float:
    """The sum in order; sum() of newer Pythons compensates, but not what is read on a device."""
    total = 0.0
    for rate in rates:
        total = total + rate
    return total


def _whole(steps: float, under: str) -> int:
    if isinstance(steps, Expression):
        raise TypeError(
            f"steps: expected a number on the host, which the geometric law needs under {under}, "
            f"got {steps!r}"
        )
    if steps != int(steps):
        raise ValueError(
            f"steps: the geometric law needs a whole number of updates under {under}, got {steps}"
        )
    return int(steps)


# (W, v) after a zero-gradient update of SGD is a 2x2 matrix times (W, v), row by row here.
Matrix: TypeAlias = tuple[float, float, float, float]
_IDENTITY: Matrix = (1.0, 0.0, 0.0, 1.0)


def _update(numbers: Sgd, lr: float) -> Matrix:
    keep = numbers.keep(lr)
    pull = numbers.gain * numbers.l2  # what the L2 penalty adds to the buffer, per weight
    mu = numbers.momentum
    if numbers.nesterov:  # W moves by pull*W + mu*v
        return keep - lr * (pull + mu * pull), -lr * mu * mu, pull, mu
    return keep - lr * pull, -lr * mu, pull, mu


def _times(a: Matrix, b: Matrix) -> Matrix:
    return (
        a[0] * b[0] + a[1] * b[2],
        a[0] * b[1] + a[1] * b[3],
        a[2] * b[0] + a[3] * b[2],
        a[2] * b[1] + a[3] * b[3],
    )


def _continuation(numbers: Sgd, steps: int) -> Term:
    """A number of zero-gradient updates, by squaring."""
    result, power = _IDENTITY, _update(numbers, numbers.lr)
    while steps:
        if steps & 1:
            result = _times(power, result)
        power = _times(power, power)
        steps >>= 1
    return Term(result[0], -result[1])


def _adam_loop(numbers: Adam, steps: int, rates: Iterable[float]) -> list[Term]:
    if steps > MAX_TERMS:
        raise ValueError(
            f"steps: expected at most {MAX_TERMS} updates ahead under Adam's loop, got {steps}"
        )
    beta1, root = numbers.betas[0], numbers.root
    return [
        Term(numbers.keep(lr), beta1**i * numbers.rate(lr, i), 0.0, root(numbers.step + i))
        for i, lr in enumerate(islice(rates, steps), start=1)
    ]
