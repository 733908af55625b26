"""Prediction laws: formulas for the weights some updates ahead.

A plain number of steps means the linear law. Notation: W weights, v momentum buffer (m and u for
Adam), d gradient with weight decay, s horizon in updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, SupportsFloat, TypeAlias

from spectrain_ext._C import MAX_TERMS

from .numbers import AdamNumbers as AdamNumbers
from .numbers import Hyperparameters, Rate, horizon, non_negative, number
from .numbers import LionNumbers as LionNumbers
from .numbers import SgdNumbers as SgdNumbers
from .numbers import Term as Term


class Law(Protocol):
    """Protocol of a prediction law: the terms that turn current weights into predicted ones.

    Example:
        >>> class Halfway:  # half the last update, without weight decay
        ...     def sgd(self, numbers):
        ...         return [st.laws.Term(1.0, 0.5 * numbers.lr)]
        ...     def adam(self, numbers):
        ...         return st.laws.Linear(0.5).adam(numbers)
        >>> st.predict(torch.ones(1), torch.ones(1), lr=0.5, momentum=0.9, steps=Halfway())
        tensor([0.7500])
    """

    __slots__ = ()

    def sgd(self, numbers: SgdNumbers) -> list[Term]:
        """Return the terms under SGD: at most one, none if nothing changes."""

    def adam(self, numbers: AdamNumbers) -> list[Term]:
        """Return the terms under Adam, AdamW and NAdam."""

    # `lion`, alike, has at most one term too; a law without it is not defined under Lion.


Horizon: TypeAlias = SupportsFloat | Law


@dataclass(frozen=True, slots=True)
class Linear(Law):
    """Repeat the last update s times: W - s*lr*v (SpecTrain, arXiv 1809.02839).

    Under Adam, W - s*lr*m_hat/(sqrt(u_hat) + eps), without the decay term (PipeOptim, 2023). Under
    Lion, W - s*lr*sign(m)/2, see `LionNumbers`.

    Example:
        >>> st.predict(torch.ones(1), torch.ones(1), lr=0.25, steps=st.laws.Linear(2))
        tensor([0.5000])
    """

    steps: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", horizon("steps", self.steps))

    def sgd(self, numbers: SgdNumbers) -> list[Term]:
        return [Term(1.0, numbers.lr * self.steps)] if self.steps else []

    def adam(self, numbers: AdamNumbers) -> list[Term]:
        if not self.steps:
            return []
        rate = numbers.rate()
        return [Term(1.0, self.steps * rate, 0.0, numbers.root(numbers.step))]

    def lion(self, numbers: LionNumbers) -> list[Term]:
        """Return the term under Lion: half of s updates along the sign of the average."""
        return [Term(1.0, self.steps * numbers.trust * numbers.lr)] if self.steps else []


@dataclass(frozen=True, slots=True)
class Geometric(Law):
    """Continue with s updates whose gradients are zero (FTPipe's msnag, 2021).

    SGD: W - lr*v*(mu - mu^(s+1))/(1 - mu). With an L2 penalty, decoupled decay or Nesterov
    momentum: the exact continuation, for a whole s. Adam, for i = 1..s with the bias corrections of
    step t+i: p -= lr*(beta1^i*m/(1 - beta1^(t+i))) / (sqrt(u)/sqrt(1 - beta2^(t+i)) + eps); AdamW
    first multiplies p by 1 - lr*decay. The second moment does not decay. Lion: s updates along
    sign(m), each with its decay, for a whole s.

    Example:
        >>> law = st.laws.Geometric(2)
        >>> st.predict(torch.ones(1), torch.ones(1), lr=0.25, momentum=0.5, steps=law)
        tensor([0.8125])
    """

    steps: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", horizon("steps", self.steps))

    def sgd(self, numbers: SgdNumbers) -> list[Term]:
        if not self.steps:
            return []
        mu = numbers.momentum
        if numbers.weight_decay:
            return [_continuation(numbers, _whole(self.steps, "weight decay"))]
        reach = self.steps if mu == 1.0 else (mu - mu ** (self.steps + 1.0)) / (1.0 - mu)
        return [Term(1.0, numbers.lr * reach * (mu if numbers.nesterov else 1.0))]

    def adam(self, numbers: AdamNumbers) -> list[Term]:
        steps = _whole(self.steps, "Adam")
        if steps > MAX_TERMS:
            raise ValueError(
                f"steps: expected at most {MAX_TERMS} updates ahead under Adam's loop, got {steps}"
            )
        beta1, root = numbers.betas[0], numbers.root
        return [
            Term(numbers.keep, beta1**i * numbers.rate(i), 0.0, root(numbers.step + i))
            for i in range(1, steps + 1)
        ]

    def lion(self, numbers: LionNumbers) -> list[Term]:
        """Return the term under Lion, whose average keeps its sign without gradients."""
        if not numbers.weight_decay:
            return [Term(1.0, self.steps * numbers.lr)] if self.steps else []
        steps = _whole(self.steps, "weight decay")
        keep, left, moved = numbers.keep, 1.0, 0.0
        for _ in range(steps):
            left, moved = keep * left, keep * moved + numbers.lr
        return [Term(left, moved)] if steps else []


@dataclass(frozen=True, slots=True)
class SecondOrder(Law):
    """Extrapolate the momentum by its last change as well.

    W - lr*[(D + lead)*v + D*(D+1)/2*(v - v_prev)] with D = delay; lead >= -D. After an update
    v - v_prev = (gain*d - (1 - mu)*v)/mu, so the law needs no extra state, but only the step, which
    has the gradient, can write this prediction. On the first update v_prev is 0. Lion moves by half
    of (D + lead)*lr along the sign of m + (D + 1)/2*D/(D + lead)*(m - m_prev).

    Example:
        >>> weights, gradients, momentum = torch.ones(1), torch.ones(1), torch.zeros(1)
        >>> ahead = torch.empty(1)
        >>> predict = [(st.laws.SecondOrder(1), ahead)]
        >>> st.sgd_step_(weights, gradients, momentum, lr=0.125, momentum=0.5, predict=predict)
        >>> weights, ahead
        (tensor([0.8750]), tensor([0.6250]))
    """

    delay: float
    lead: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", non_negative("delay", self.delay))
        object.__setattr__(self, "lead", number("lead", self.lead))
        if self.lead < -self.delay:
            raise ValueError(f"lead: expected at least -delay, {-self.delay}, got {self.lead}")

    def _coefficients(self, mu: float, gain: float) -> tuple[float, float]:
        change = self.delay * (self.delay + 1.0) / 2.0
        return self.delay + self.lead - change * (1.0 - mu) / mu, change * gain / mu

    def sgd(self, numbers: SgdNumbers) -> list[Term]:
        if not self.delay and not self.lead:
            return []
        if not numbers.momentum:
            raise ValueError("momentum: a second-order prediction needs momentum > 0")
        momentum, gradient = self._coefficients(numbers.momentum, numbers.gain)
        return [Term(1.0, numbers.lr * momentum, numbers.lr * gradient * numbers.trust)]

    def adam(self, numbers: AdamNumbers) -> list[Term]:
        if not self.delay and not self.lead:
            return []
        beta1 = numbers.betas[0]
        if beta1 == 0.0:
            raise ValueError("betas[0]: a second-order prediction needs momentum > 0")
        momentum, gradient = self._coefficients(beta1, 1.0 - beta1)
        rate = numbers.rate()
        return [Term(1.0, rate * momentum, rate * gradient, numbers.root(numbers.step))]

    def lion(self, numbers: LionNumbers) -> list[Term]:
        """Return the term under Lion, along the sign of the extrapolated average."""
        reach, beta2 = self.delay + self.lead, numbers.betas[1]
        if not reach:
            return []
        if beta2 == 0.0:
            raise ValueError("betas[1]: a second-order prediction needs an average of gradients")
        momentum, gradient = self._coefficients(beta2, 1.0 - beta2)
        if momentum <= 0.0:  # D is so long that the change outweighs the average
            raise ValueError(
                f"steps: {self} is not defined under Lion with betas[1] = {beta2}: expected a "
                "shorter delay"
            )
        return [Term(1.0, reach * numbers.trust * numbers.lr, gradient / momentum)]


_linear = lru_cache(maxsize=256)(Linear)  # a training loop uses the same few at every step


def as_law(steps: Horizon, name: str = "steps") -> Law:
    """Return a law unchanged, and a number of steps as the linear law."""
    if isinstance(steps, (int, float)):
        return _linear(horizon(name, steps))
    if hasattr(type(steps), "sgd"):
        return steps  # type: ignore[return-value]
    return Linear(horizon(name, steps))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)  # a run repeats the same few
def law_named(law: str | Callable[[int], Law], horizon: int) -> Law:
    """Return a method's law, a name or a function, for a prediction that no step writes."""
    if not isinstance(law, str):
        return law(horizon)
    return Geometric(horizon) if law == "geometric" else Linear(horizon)


def terms_of(law: Law, numbers: Hyperparameters) -> list[Term]:
    """Return the terms of a law under an update rule, by the law's method of the rule's name.

    At most one under SGD and Lion; ValueError for a rule that the law does not support.
    """
    formula = getattr(law, numbers.rule, None)
    if formula is None:
        raise ValueError(f"steps: {law} is not defined under {numbers.rule}")
    terms: list[Term] = formula(numbers)
    if len(terms) > 1 and not isinstance(numbers, AdamNumbers):
        under = "SGD" if isinstance(numbers, SgdNumbers) else numbers.rule.capitalize()
        raise ValueError(f"steps: expected at most one term under {under}, {law} gave {len(terms)}")
    return [term.split() for term in terms] if isinstance(numbers.lr, Rate) else terms


def after_first_step(law: Law, numbers: SgdNumbers) -> Law:
    """Return the law for a prediction by a step that sets v to d, without the gain."""
    if isinstance(law, SecondOrder) and numbers.gain != 1.0:  # v_prev is 0
        return Linear(law.delay + law.lead + law.delay * (law.delay + 1.0) / 2.0)
    return law


def _whole(steps: float, under: str) -> int:
    if steps != int(steps):
        raise ValueError(
            f"steps: the geometric law needs a whole number of updates under {under}, got {steps}"
        )
    return int(steps)


# A zero-gradient update of SGD multiplies (W, v) by a 2x2 matrix, stored row by row.
Matrix: TypeAlias = tuple[float, float, float, float]
_IDENTITY: Matrix = (1.0, 0.0, 0.0, 1.0)


def _update(numbers: SgdNumbers) -> Matrix:
    keep, lr = numbers.keep, numbers.lr
    pull = numbers.gain * numbers.l2  # the L2 penalty's contribution to the buffer, per weight
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


def _continuation(numbers: SgdNumbers, steps: int) -> Term:
    """Return the term of several zero-gradient updates, by repeated squaring."""
    result, power = _IDENTITY, _update(numbers)
    while steps:
        if steps & 1:
            result = _times(power, result)
        power = _times(power, power)
        steps >>= 1
    return Term(result[0], -result[1])
