"""Defines corrections: how a step uses a gradient that was computed with other weights.

Notation: W the weights that are updated, W_stale those that the gradient was computed with, g the
gradient (scaled, clipped, negated to maximize), v the momentum, d what the momentum adds: g with
the L2 penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .numbers import Adam, Corrected, Sgd, Term, fraction, horizon, non_negative

_FAR_LONGER = 1e8  # than a momentum: the angle is known to eight digits


class Correction:
    """A correction in a step's coefficients, which costs nothing; by default the plain ones."""

    __slots__ = ()
    reads_stale: ClassVar[bool] = False  # the weights that the gradient was computed with
    buffers: ClassVar[tuple[str, ...]] = ()  # keys of its state, shaped like the parameters

    def sgd(self, numbers: Sgd) -> Term:
        """Return the step under SGD; ValueError for numbers it does not support."""
        return numbers.term()

    def adam(self, numbers: Adam) -> Term:
        """Return the step under Adam, AdamW and NAdam; ValueError as for SGD."""
        raise ValueError(f"{self} is defined for SGD")


class Late(NamedTuple):
    """Gradients before a step, and what to correct them by; lists with an entry per parameter."""

    gradients: list[Tensor]  # unscaled, in the dtype of the weights
    weights: list[Tensor]  # W; the step updates them
    gaps: list[Tensor]  # W - W_stale; may be overwritten
    state: list[list[Tensor]]  # the optimizer's buffers, its momentum first, then the correction's
    averaged: int  # updates that the correction's buffers contain
    numbers: Sgd | Adam  # of this step
    largest_lr: float  # of all updates, including this one; 0 without averages


class StaleCorrection(Correction):
    """A correction of the gradients before the step, by the weights they were computed with.

    By operations that round once, so that the bits are the same on every device.
    """

    __slots__ = ()
    reads_stale: ClassVar[bool] = True

    def correct_(self, late: Late) -> None:
        """Change the gradients for the step, which adds the L2 penalty of W to them."""
        raise NotImplementedError

    def average(self, late: Late, before: list[Tensor]) -> None:
        """Update the averages after the step, given the weights before it under Adam."""


@dataclass(frozen=True, slots=True)
class DelayCompensation(StaleCorrection):
    """DC-ASGD: g + strength*g*g*(W - W_stale), with the L2 penalty of W added after it.

    Zheng et al., arXiv 1609.08326, equation 10, with a constant strength: g*g stands for the
    diagonal of the Hessian in the gradient's Taylor expansion. Strength 0 and unchanged weights
    give the plain step bit for bit. For SGD, Adam, AdamW and NAdam.

    Args:
        strength: at least 0.

    Example:
        >>> late = lambda place: st.corrections.DelayCompensation(0.5) if place.window > 1 else None
        >>> method = st.Method("mine", "compensated", backward="stash", correction=late)
        >>> stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> optimizer = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)
        >>> pipe = st.Pipeline(stages, optimizer, nn.functional.mse_loss, method=method)
    """

    strength: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", non_negative("strength", self.strength))

    def correct_(self, late: Late) -> None:
        if self.strength:
            strength = -self.strength if late.numbers.maximize else self.strength
            torch._foreach_mul_(late.gaps, late.gradients)
            torch._foreach_mul_(late.gaps, late.gradients)
            torch._foreach_mul_(late.gaps, strength)
            torch._foreach_add_(late.gradients, late.gaps)


@dataclass(frozen=True, slots=True)
class GapAware(StaleCorrection):
    """Gradients divided by how far the weights have moved: d/(1 + abs(W - W_stale)/C) per element.

    C is the typical size of an update (Barkai, Hakimi, Schuster, arXiv 1909.10802). SGD:
    C = largest_lr*(sqrt(A_hat) + 1e-8), A the average of v*v, with the largest learning rate so
    far. Adam: C = sqrt(A_hat) + eps, A the average of the squared updates, without decoupled decay,
    which is not corrected. After an update A <- decay*A + (1 - decay)*(its square), and
    A_hat = A/(1 - decay^n) after n updates. The first update corrects nothing. Unchanged weights
    give the plain step bit for bit. State has A as ``gap_average`` and n as ``gap_step``, and
    parameter groups the largest learning rate as ``gap_rate``.

    Args:
        decay: of the average, below 1.

    Example:
        >>> late = lambda place: st.corrections.GapAware() if place.window > 1 else None
        >>> method = st.Method("mine", "gap-aware PipeDream", backward="stash", correction=late)
    """

    buffers: ClassVar[tuple[str, ...]] = ("gap_average",)

    decay: float = 0.999

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", fraction("decay", self.decay))

    def correct_(self, late: Late) -> None:
        numbers = late.numbers
        scale, eps = (late.largest_lr, 1e-8) if isinstance(numbers, Sgd) else (1.0, numbers.eps)
        if not late.averaged or not scale:
            return
        sizes = torch._foreach_sqrt(late.state[-1])  # C
        torch._foreach_mul_(sizes, scale * (1.0 - self.decay**late.averaged) ** -0.5)
        torch._foreach_add_(sizes, scale * eps)
        torch._foreach_abs_(late.gaps)
        torch._foreach_add_(late.gaps, sizes)
        torch._foreach_div_(sizes, late.gaps)  # from here on C/(C + gap), 1 without a gap
        torch._foreach_mul_(late.gradients, sizes)
        # The step adds the whole L2 penalty p again: share*(g + p) - p = share*g + (share - 1)*p.
        sign, l2, *_ = numbers.setting()
        if l2:
            torch._foreach_add_(sizes, -1.0)
            torch._foreach_mul_(sizes, late.weights)
            torch._foreach_mul_(sizes, sign * l2)
            torch._foreach_add_(late.gradients, sizes)

    def average(self, late: Late, before: list[Tensor]) -> None:
        updates, averages = late.state[0], late.state[-1]
        if isinstance(late.numbers, Adam):
            torch._foreach_mul_(before, late.numbers.keep)
            updates = list(torch._foreach_sub(before, late.weights))
        squares = torch._foreach_mul(updates, updates)
        torch._foreach_mul_(squares, 1.0 - self.decay)
        torch._foreach_mul_(averages, self.decay)
        torch._foreach_add_(averages, squares)


@dataclass(frozen=True, slots=True)
class OwnCorrection(Correction):
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
class SpikeCompensation(Correction):
    """Gives a late gradient at once the share of the momentum that it would have by now.

    W' = W - lr*(mu^D*v' + (1 - mu^D)/(1 - mu)*d) (Kosson et al., arXiv 2003.11666), for SGD. D = 0
    is plain SGD and D = 1 Nesterov momentum, with the same coefficients bit for bit.

    Args:
        delay: D, the updates by which the gradient is late, at least 0.

    Example:
        >>> late = lambda place: st.corrections.SpikeCompensation(place.window - 1)
        >>> method = st.Method("mine", "spikes", correction=late, families=("sgd",))
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
class AdaptiveBraking(Correction):
    """Shrinks gradients along the momentum and grows those against it.

    v' = mu*v + (1 - strength*cos(g, v))*g + decay*W, with the angle of each parameter's own tensors
    (Venigalla et al., arXiv 2007.01397). For SGD with momentum; weight decay is not braked.

    Args:
        strength: rho, at least 0.

    Example:
        >>> late = lambda place: st.corrections.AdaptiveBraking(1.0) if place.window > 1 else None
        >>> method = st.Method("mine", "braking", correction=late, families=("sgd",))
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
        lengths: Tensor,  # of gradients, momenta, and their differences, float64 [3, n]
        maximize: bool = False,
    ) -> None:
        """Scale gradients in place by their angles with the momentum before this step.

        All are on one device. A step that maximizes has the momentum of negated gradients.
        """
        strength = -self.strength if maximize else self.strength
        g, v, apart = lengths
        # By the law of cosines, with a rounding error of 1e-16*(g/v + v/g): negligible if v is
        # longer; next to a far longer g the angle is unknown and counts as 90 degrees.
        cosines = ((g * g + v * v - apart * apart) / (2.0 * g * v)).clamp_(-1.0, 1.0)
        cosines = cosines.where((g > 0.0) & (g < _FAR_LONGER * v), 0.0)
        torch._foreach_mul_(list(gradients), list((1.0 - strength * cosines).unbind()))
