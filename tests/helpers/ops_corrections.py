"""Corrections by stale weights for SGD and Adam, in the arithmetic of ops_reference.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from helpers import ops_reference as ref
from helpers.ops_rules import Adam, _step
from torch import Tensor

from spectrain_ext.operators.corrections import DelayCompensation, GapAware

Correction = DelayCompensation | GapAware


def corrected(
    correction: Correction,
    hyper: ref.SGD | Adam,
    g: Tensor,
    w: Tensor,
    stale: Tensor,
    average: Tensor | None = None,
    *,
    largest_lr: float = 0.0,
    averaged: int = 0,
) -> ref.Array:
    """Return a step's direction d: its gradient, penalized or compensated, with decay."""
    wide = ref.widen(w)
    scalar = ref.scalars_like(wide)
    old = ref.as_type(ref.widen(stale), wide)
    same = wide == old
    with np.errstate(all="ignore"):
        given = ref.as_type(ref.widen(g), wide) * scalar(-1.0 if hyper.maximize else 1.0)
        if isinstance(correction, DelayCompensation):
            strength = scalar(correction.strength)
            compensated = ref.fma(strength * given * given, wide - old, given)
            given = np.where(same | (strength == 0), given, compensated)
        plain = replace(hyper, maximize=False)
        d = plain.direction(w, ref.narrow(given, w))
        if isinstance(correction, DelayCompensation) or averaged == 0:
            return d
        assert average is not None
        sgd = isinstance(hyper, ref.SGD)
        strength = scalar(1.0 / largest_lr if sgd else 1.0)
        root = scalar((1.0 - correction.decay**averaged) ** -0.5)
        eps = scalar(1e-8 if isinstance(hyper, ref.SGD) else hyper.eps)
        usual = ref.fma(
            root, np.sqrt(ref.as_type(ref.widen(average), wide)), np.full_like(wide, eps)
        )
        gap = np.where(wide < old, old - wide, wide - old)
        return np.where(same, d, d / (scalar(1.0) + strength * gap / usual))


def averaged(correction: GapAware, average: Tensor, step: ref.Array) -> Tensor:
    wide = ref.as_type(ref.widen(average), step)
    scalar = ref.scalars_like(step)
    with np.errstate(all="ignore"):
        gain = scalar(1.0 - correction.decay) * step * step
        return ref.narrow(ref.fma(scalar(correction.decay), wide, gain), average)


def along(hyper: Any, d: ref.Array) -> Any:
    """Return the same step with this direction."""

    class Along(type(hyper)):  # type: ignore[misc]
        def direction(self, w: Tensor, g: Tensor) -> ref.Array:
            return d

    return Along(**vars(hyper))


def way(hyper: Adam, m: Tensor, u: Tensor, d: ref.Array) -> ref.Array:
    """Return what Adam subtracts from the weights, and its moments after the step."""
    scalar = ref.scalars_like(d)
    with np.errstate(all="ignore"):
        wide = ref.as_type(ref.widen(m), d), ref.as_type(ref.widen(u), d)
        return _step(scalar, *hyper.rates(), hyper.eps, *wide, d)
