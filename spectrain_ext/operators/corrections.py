"""Defines corrections: how a step uses a gradient that was computed with other weights.

Notation: W the weights that are updated, W_stale those that the gradient was computed with, g the
gradient (scaled, clipped, negated to maximize), v the momentum, d what the momentum adds: g with
the L2 penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .expressions import Expression
from .numbers import Adam, Corrected, Sgd, Term, fraction, horizon, non_negative, number

_FAR_LONGER = 1e8  # than a momentum: the angle is known to eight digits

# One group's coefficients: strength, decay, root, eps; csrc/core/setting.h defines them for each
# correction.
Coefficients: TypeAlias = tuple[float, float, float, float]


class Correction:
    """A correction of a step's gradient, as a value."""

    __slots__ = ()
    reads_stale: ClassVar[bool] = False  # the weights that the gradient was computed with
    buffers: ClassVar[tuple[str, ...]] = ()  # keys of its state, shaped like the parameters


class StaleCorrection(Correction):
    """A correction within the step's own pass, which reads the stale weights there."""

    __slots__ = ()
    reads_stale: ClassVar[bool] = True

    def coefficients(
        self,
        numbers: Sgd | Adam,
        largest_lr: float,  # of all updates, including this one
        averaged: int,  # updates whose squares are in the buffer
    ) -> Coefficients:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class DelayCompensation(StaleCorrection):
    """DC-ASGD: g + strength*g*g*(W - W_stale), with the L2 penalty of W added after it.

    Zheng et al., arXiv 1609.08326, equation 10, with a constant strength: g*g stands for the
    diagonal of the Hessian in the gradient's Taylor expansion. Strength 0 and unchanged weights
    give the plain step bit for bit. For SGD, Adam, AdamW and NAdam.

    Args:
        strength: at least 0.

    Example:
        >>> weights, momentum = torch.tensor([1.0]), torch.zeros(1)
        >>> late = st.corrections.DelayCompensation(0.5)
        >>> stale, gradient = torch.tensor([0.5]), torch.tensor([2.0])
        >>> _ = st.sgd_step_(
        ...     weights, gradient, momentum, lr=0.1, momentum=0.9, correction=late, stale=stale
        ... )
        >>> weights  # 1 - 0.1*(2 + 0.5*2*2*0.5)
        tensor([0.7000])
    """

    strength: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", non_negative("strength", self.strength))

    def coefficients(self, numbers: Sgd | Adam, largest_lr: float, averaged: int) -> Coefficients:
        return self.strength, 0.0, 0.0, 0.0


@dataclass(frozen=True, slots=True)
class GapAware(StaleCorrection):
    """Gradients divided by how far the weights have moved: d/(1 + abs(W - W_stale)/C) per element.

    C is the typical size of an update (Barkai, Hakimi, Schuster, arXiv 1909.10802). SGD:
    C = largest_lr*(sqrt(A_hat) + 1e-8), A the average of v*v (of d*d without momentum), with the
    largest learning rate so far. Adam: C = sqrt(A_hat) + eps, A the average of the squared updates,
    without decoupled decay, which is not corrected. After an update A <- decay*A + (1 - decay)*(its
    square), and A_hat = A/(1 - decay^n) after n updates. The first update corrects nothing.
    Unchanged weights give the plain step bit for bit.

    Args:
        decay: of the average, below 1.

    Example:
        >>> late = lambda place: st.corrections.GapAware() if place.window > 1 else None
        >>> method = st.Method("mine", "gap-aware PipeDream", backward="stash", correction=late)
        >>> stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> optimizer = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)
        >>> pipe = st.Pipeline(stages, optimizer, nn.functional.mse_loss, method=method)
    """

    buffers: ClassVar[tuple[str, ...]] = ("gap_average",)

    decay: float = 0.999

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", fraction("decay", self.decay))

    def coefficients(self, numbers: Sgd | Adam, largest_lr: float, averaged: int) -> Coefficients:
        """Return strength 0, the plain step, while there is no average or no learning rate."""
        if averaged < 1 or (isinstance(numbers, Sgd) and largest_lr == 0.0):
            return 0.0, self.decay, 0.0, 0.0
        root: float = (1.0 - self.decay**averaged) ** -0.5
        if isinstance(numbers, Sgd):
            return 1.0 / largest_lr, self.decay, root, 1e-8
        return 1.0, self.decay, root, numbers.eps


def stale_correction(correction: object) -> StaleCorrection:
    """Return the correction if it reads stale weights; else raise TypeError."""
    if isinstance(correction, StaleCorrection):
        return correction
    raise TypeError(
        "correction: expected one of spectrain_ext.corrections that reads stale weights, such as "
        f"DelayCompensation(0.04), got {correction!r}"
    )


def coefficients_of(
    correction: object,
    groups: Sequence[Sgd] | Sequence[Adam],
    largest_lr: float | None,  # of all groups; None: the step's own
    averaged: int,  # of all groups
) -> tuple[bool, list[Coefficients]] | None:
    """Return whether there is an average, and every group's coefficients for the native step."""
    if correction is None:
        return None
    stale = stale_correction(correction)
    updates = number("averaged", averaged)
    if updates < 0 or updates != int(updates):
        raise ValueError(f"averaged: expected a whole number >= 0, got {averaged!r}")
    given = None if largest_lr is None else non_negative("largest_lr", largest_lr)
    coefficients = []
    for numbers in groups:
        rate = numbers.lr if given is None else given
        if isinstance(rate, Expression) and stale.buffers:
            raise TypeError("largest_lr: needed as a number where lr is read when the step runs")
        coefficients.append(stale.coefficients(numbers, rate, int(updates)))
    return bool(stale.buffers), coefficients


class StepCorrection(Correction):
    """A correction in a step's coefficients, which costs nothing; by default the plain ones."""

    __slots__ = ()

    def sgd(self, numbers: Sgd) -> Term:
        """Return the step under SGD; ValueError for numbers it does not support."""
        return numbers.term()

    def adam(self, numbers: Adam) -> Term:
        """Return the step under Adam, AdamW and NAdam; ValueError as for SGD."""
        raise ValueError(f"{self} is defined for SGD")


@dataclass(frozen=True, slots=True)
class OwnCorrection(StepCorrection):
    """Wraps an object with its own ``sgd`` and ``adam``."""

    rule: Corrected

    def sgd(self, numbers: Sgd) -> Term:
        return self.rule.sgd(numbers)

    def adam(self, numbers: Adam) -> Term:
        return self.rule.adam(numbers)

    def __str__(self) -> str:
        return str(self.rule)


def as_correction(value: Any) -> Correction:
    """Return a correction, or wrap an object with ``sgd`` and ``adam``; else raise TypeError."""
    if isinstance(value, Correction):
        return value
    own = not isinstance(value, type)
    if own and all(callable(getattr(value, name, None)) for name in ("sgd", "adam")):
        return OwnCorrection(value)
    raise TypeError(
        "correction: expected one of spectrain_ext.corrections, or an object with sgd and adam, "
        f"which give a step as a Term, got {value!r}"
    )


@dataclass(frozen=True, slots=True)
class SpikeCompensation(StepCorrection):
    """Gives a late gradient at once the share of the momentum that it would have by now.

    W' = W - lr*(mu^D*v' + (1 - mu^D)/(1 - mu)*d) (Kosson et al., arXiv 2003.11666), for SGD. D = 0
    is plain SGD and D = 1 Nesterov momentum, with the same coefficients bit for bit.

    Args:
        delay: D, the updates by which the gradient is late, at least 0.

    Example:
        >>> late = lambda place: st.corrections.SpikeCompensation(place.window - 1)
        >>> method = st.Method("mine", "spikes", correction=late, families=("sgd",))
        >>> stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> optimizer = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)
        >>> pipe = st.Pipeline(stages, optimizer, nn.functional.mse_loss, method=method)
    """

    delay: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", horizon("delay", self.delay))

    def sgd(self, numbers: Sgd) -> Term:
        plain = numbers.term()
        mu = numbers.momentum
        if not self.delay or mu == 0.0:
            return plain
        if numbers.nesterov:
            raise ValueError("nesterov: is spike compensation for a delay of 1, expected False")
        left = mu**self.delay
        now = self.delay if mu == 1.0 else (1.0 - left) / (1.0 - mu)
        return Term(plain.keep, numbers.lr * left, numbers.lr * now * numbers.gain)


@dataclass(frozen=True, slots=True)
class ErrorFeedback(StepCorrection):
    """Makes up for what the previous update has missed, for a delay of one update.

    W' = W - lr*(2*u' - u), u the previous update, 0 at first (arXiv 2606.30634). SGD: u is the
    momentum, whose old value follows from the new one: v = (v' - gain*d)/mu. Adam: u is
    m_hat/(sqrt(u_hat) + eps), both with the present denominator, because the old one is gone. Not
    for Nesterov, dampening or NAdam.

    Example:
        >>> feedback = lambda place: st.corrections.ErrorFeedback()
        >>> method = st.Method("mine", "feedback", correction=feedback, families=("sgd", "adam"))
        >>> stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> optimizer = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)
        >>> pipe = st.Pipeline(stages, optimizer, nn.functional.mse_loss, method=method)
    """

    def sgd(self, numbers: Sgd) -> Term:
        mu, plain = numbers.momentum, numbers.term()
        if mu == 0.0:
            raise ValueError("momentum: error feedback needs one, which tells the update before")
        if numbers.nesterov or numbers.dampening != 0.0:
            raise ValueError("nesterov, dampening: error feedback is not defined with them")
        return Term(plain.keep, numbers.lr * (2.0 - 1.0 / mu), numbers.lr * numbers.gain / mu)

    def adam(self, numbers: Adam) -> Term:
        beta1, plain = numbers.betas[0], numbers.term()
        if numbers.momentum_decay is not None:
            raise ValueError("NAdam: error feedback is not defined for it")
        if beta1 == 0.0:
            raise ValueError("betas[0]: error feedback needs one, which tells the update before")
        # The first step has no previous update and no bias to correct.
        before = 0.0 if numbers.step == 1 else numbers.lr / (1.0 - beta1 ** (numbers.step - 1))
        momentum = 2.0 * plain.momentum - before / beta1
        return Term(plain.keep, momentum, before * (1.0 - beta1) / beta1, plain.root)


@dataclass(frozen=True, slots=True)
class AdaptiveBraking(StepCorrection):
    """Shrinks gradients along the momentum and grows those against it.

    v' = mu*v + (1 - strength*cos(g, v))*g, with the angle of each parameter's own tensors
    (Venigalla et al., arXiv 2007.01397). For SGD with momentum; weight decay does not affect it.

    Args:
        strength: rho, at least 0.

    Example:
        >>> late = lambda place: st.corrections.AdaptiveBraking(1.0) if place.window > 1 else None
        >>> method = st.Method("mine", "braking", correction=late, families=("sgd",))
        >>> stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> optimizer = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)
        >>> pipe = st.Pipeline(stages, optimizer, nn.functional.mse_loss, method=method)
    """

    strength: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", non_negative("strength", self.strength))

    def sgd(self, numbers: Sgd) -> Term:
        if numbers.momentum == 0.0:
            raise ValueError("momentum: braking needs one, to measure the angle with")
        return numbers.term()

    def brake_(
        self,
        gradients: Sequence[Tensor],
        momenta: Sequence[Tensor],
        apart: Tensor,  # the lengths of gradients - momenta, in float64
        maximize: bool = False,
    ) -> None:
        """Scale gradients in place by their angles with the momentum before this step.

        All are on one device. A step that maximizes has the momentum of negated gradients.
        """
        strength = -self.strength if maximize else self.strength
        g, v = (
            torch.stack(torch._foreach_norm(list(these), 2, dtype=torch.float64))
            for these in (gradients, momenta)
        )
        # By the law of cosines, with a rounding error of 1e-16*(g/v + v/g): negligible if v is
        # longer; next to a far longer g the angle is unknown and counts as 90 degrees.
        cosines = ((g * g + v * v - apart * apart) / (2.0 * g * v)).clamp_(-1.0, 1.0)
        cosines = cosines.where((g > 0.0) & (g < _FAR_LONGER * v), 0.0)
        torch._foreach_mul_(list(gradients), list((1.0 - strength * cosines).unbind()))
