"""Corrections of gradients that were computed with stale weights.

Notation: W the weights that are updated, W_stale the weights that the gradient was computed with, g
the gradient (scaled and clipped; -g to maximize), v the momentum, d the gradient with the L2
penalty, which the momentum accumulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .expressions import Expression
from .numbers import Adam, Corrected, Sgd, Term, fraction, horizon, non_negative, number

_FAR_LONGER = 1e8  # a gradient longer than the momentum by this factor has no measurable angle

# Strength, decay, root and eps of one group; csrc/core/setting.h gives their meaning.
Coefficients: TypeAlias = tuple[float, float, float, float]


class Correction:
    """A correction of a step's gradient."""

    __slots__ = ()
    reads_stale: ClassVar[bool] = False  # whether it reads the weights of the gradient
    buffers: ClassVar[tuple[str, ...]] = ()  # keys of its state tensors, shaped like the parameters


class StaleCorrection(Correction):
    """A correction inside the step's kernel, which reads the stale weights."""

    __slots__ = ()
    reads_stale: ClassVar[bool] = True

    def coefficients(
        self,
        numbers: Sgd | Adam,
        largest_lr: float,  # the largest learning rate so far, this step's included
        averaged: int,  # updates in the average
    ) -> Coefficients:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class DelayCompensation(StaleCorrection):
    """g + strength*g*g*(W - W_stale), with the L2 penalty of W added after it.

    DC-ASGD (Zheng et al., arXiv 1609.08326), equation 10, with a constant strength: g*g stands for
    the diagonal of the Hessian in the gradient's Taylor expansion. Strength 0, and weights that did
    not change, are the plain step to the bit.
    """

    strength: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", non_negative("strength", self.strength))

    def coefficients(self, numbers: Sgd | Adam, largest_lr: float, averaged: int) -> Coefficients:
        return self.strength, 0.0, 0.0, 0.0


@dataclass(frozen=True, slots=True)
class GapAware(StaleCorrection):
    """d / P, P = 1 + abs(W - W_stale)/C per element: C is the way that one update usually makes.

    Barkai, Hakimi, Schuster, "Gap Aware Mitigation of Gradient Staleness" (arXiv 1909.10802). SGD:
    C = largest_lr*(sqrt(A_hat) + 1e-8), A the average of v*v (of d*d without momentum), with the
    largest learning rate so far. Adam: C = sqrt(A_hat) + eps, A the average of what each update
    took from the weights, squared; without decoupled decay, which is left alone. After an update
    A <- decay*A + (1 - decay)*(its square), A_hat = A/(1 - decay^n) after n updates. So P is of
    the updates before, and 1 at the first one, which has none. Weights that did not change are the
    plain step to the bit.
    """

    buffers: ClassVar[tuple[str, ...]] = ("gap_average",)

    decay: float = 0.999

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", fraction("decay", self.decay))

    def coefficients(self, numbers: Sgd | Adam, largest_lr: float, averaged: int) -> Coefficients:
        """Return strength 0 (P = 1) as long as there is no average or no learning rate."""
        if averaged < 1 or (isinstance(numbers, Sgd) and largest_lr == 0.0):
            return 0.0, self.decay, 0.0, 0.0
        root: float = (1.0 - self.decay**averaged) ** -0.5
        if isinstance(numbers, Sgd):
            return 1.0 / largest_lr, self.decay, root, 1e-8
        return 1.0, self.decay, root, numbers.eps


def stale_correction(correction: object) -> StaleCorrection:
    """Return the correction if it reads stale weights; otherwise TypeError."""
    if isinstance(correction, StaleCorrection):
        return correction
    raise TypeError(
        "correction: expected one of spectrain_ext.corrections that reads stale weights, such as "
        f"DelayCompensation(0.04), got {correction!r}"
    )


def coefficients_of(
    correction: object,
    groups: Sequence[Sgd] | Sequence[Adam],
    largest_lr: float | None,  # for all groups; None: the step's own
    averaged: int,  # for all groups
) -> tuple[bool, list[Coefficients]] | None:
    """Return whether there is an average, and the coefficients of every group."""
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
    """A correction that only changes the step's coefficients, at no cost; by default unchanged."""

    __slots__ = ()

    def sgd(self, numbers: Sgd) -> Term:
        """Return the step under SGD; ValueError if it is undefined for these hyperparameters."""
        return numbers.term()

    def adam(self, numbers: Adam) -> Term:
        """Return the step under Adam, AdamW and NAdam; ValueError if it is undefined."""
        raise ValueError(f"{self} is defined for SGD")


@dataclass(frozen=True, slots=True)
class OwnCorrection(StepCorrection):
    """A user's object with ``sgd`` and ``adam`` methods."""

    rule: Corrected

    def sgd(self, numbers: Sgd) -> Term:
        return self.rule.sgd(numbers)

    def adam(self, numbers: Adam) -> Term:
        return self.rule.adam(numbers)

    def __str__(self) -> str:
        return str(self.rule)


def as_correction(value: Any) -> Correction:
    """Return a correction, or wrap an object with ``sgd`` and ``adam``; else TypeError."""
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
    """A late gradient at once gets the share of the momentum that it would have had by now.

    W' = W - lr*(mu^D*v' + (1 - mu^D)/(1 - mu)*d) (Kosson et al., arXiv 2003.11666); d times what
    the momentum takes of it. D = 0 is plain SGD and D = 1 is Nesterov momentum, to the bit of the
    coefficients.

    Args:
        delay: D, the updates by which the gradient is late (>= 0).
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
    """For a delay of one update: what the update before has missed is made up for.

    W' = W - lr*(2*u' - u), u the update before and 0 at first (arXiv 2606.30634). Under SGD u is
    the momentum, whose old value the new one tells: v = (v' - gain*d)/mu. Under Adam u is
    m_hat/(sqrt(u_hat) + eps), where both have the denominator of the present step, as the old one
    is gone.
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
        # The first step has no previous update.
        before = 0.0 if numbers.step == 1 else numbers.lr / (1.0 - beta1 ** (numbers.step - 1))
        momentum = 2.0 * plain.momentum - before / beta1
        return Term(plain.keep, momentum, before * (1.0 - beta1) / beta1, plain.root)


@dataclass(frozen=True, slots=True)
class AdaptiveBraking(StepCorrection):
    """Gradients along the momentum shrink, those against it grow.

    v' = mu*v + (1 - strength*cos(g, v))*g, the angle of every parameter's own tensors (Venigalla et
    al., arXiv 2007.01397). Weight decay has no part in it.

    Args:
        strength: rho (>= 0).
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
        apart: Tensor,  # norms of gradients - momenta, float64
        maximize: bool = False,
    ) -> None:
        """Scale each gradient in place by its angle with the momentum before this step.

        All tensors are on one device. With `maximize` the momentum is of negated gradients.
        """
        strength = -self.strength if maximize else self.strength
        g, v = (
            torch.stack(torch._foreach_norm(list(these), 2, dtype=torch.float64))
            for these in (gradients, momenta)
        )
        # The law of cosines; its rounding error is 1e-16*(g/v + v/g). That is negligible if v is
        # longer; if g is far longer, no angle is measurable.
        cosines = ((g * g + v * v - apart * apart) / (2.0 * g * v)).clamp_(-1.0, 1.0)
        cosines = cosines.where((g > 0.0) & (g < _FAR_LONGER * v), 0.0)
        torch._foreach_mul_(list(gradients), list((1.0 - strength * cosines).unbind()))
