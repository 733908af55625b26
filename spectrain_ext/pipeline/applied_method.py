"""Applies methods to the stages of a pipeline, with clipping; refuses what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

import torch

from spectrain_ext.method import Method, Window, check_optimizer, factor_of, phases_on, rules_at
from spectrain_ext.schedule import Generator, Place, Replicas, Rules, count_stage, flushes
from spectrain_ext.weights import StageMemory, StageWeights

#: Whose gradient norm clips.
ClipScope = Literal["auto", "stage", "global"]


class AppliedMethod(NamedTuple):
    """A method on the stages of a pipeline, which trains by one at a time."""

    method: Method
    places: list[Place]  # of all stages
    max_norms: list[float | None]  # the largest gradient norms, of all stages
    globally: bool  # whether by the norm of all stages' gradients

    def followed_by(
        self, k: int, optimizer: torch.optim.Optimizer
    ) -> tuple[Rules, tuple[Place, Place], str | Generator]:
        """Return what ``StageWeights.follow`` takes for a stage with this optimizer."""
        rules = rules_at(self.method, self.places[k], optimizer)
        return rules, (self.places[0], self.places[k]), self.method.schedule

    def memory(self, k: int, weights: StageWeights | None) -> StageMemory:
        if weights is not None:
            return weights.predicted(*self.followed_by(k, weights.optimizer))
        count = count_stage(self.method.schedule, self.places[0], self.places[k], Rules(), False)
        return StageMemory(0, 0, count.in_flight)


def applied(
    method: Method,
    microbatches: int,
    window: Window,
    replicas: Replicas,
    clip_norm: float | None,
    clip_scope: ClipScope,
) -> list[AppliedMethod]:
    """Apply a method, and those that it changes to, to stages; refuse what is impossible."""
    found = []
    for one, places in phases_on(method, replicas.stages, microbatches, window, replicas):
        for place in places:
            rules_at(one, place)  # refuses what a stage cannot have
        norms = [max_norm_at(one, place, clip_norm) for place in places]
        globally = clips_globally(one, clip_norm, clip_scope)
        found.append(AppliedMethod(one, places, norms, globally))
    return found


def check_optimizers(
    methods: Iterable[AppliedMethod], weights: Mapping[int, StageWeights | None]
) -> None:
    """Refuse optimizers, by the indices of their stages, that do not fit a method."""
    for each in methods:
        for k, own in ((k, w.optimizer) for k, w in weights.items() if w is not None):
            _check_rates(each.method, each.places[k], own)
            check_optimizer(each.method, each.followed_by(k, own)[0], k, own)


def _check_rates(method: Method, place: Place, optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups if factor_of(method, place) else ()):
        if group.get("lr") is None:
            raise ValueError(
                f"optimizer: parameter group {index} of the {type(optimizer).__name__} of "
                f"stages[{place.stage}] has no 'lr' that method {method.name!r} could multiply; "
                "set it, or choose a method without rates"
            )


# Clipping.


def clips_globally(method: Method, clip_norm: float | None, clip_scope: ClipScope) -> bool:
    """Whether a method clips by the gradient norm of all stages together."""
    if clip_scope not in get_args(ClipScope):
        raise ValueError(f"clip_scope: expected one of {get_args(ClipScope)}, got {clip_scope!r}")
    if clip_scope == "auto":
        return clip_norm is not None and flushes(method.schedule)
    if clip_scope == "global" and not flushes(method.schedule):
        raise ValueError(
            f"clip_scope: under method {method.name!r} the stages of an asynchronous pipeline "
            "update at different times, each with another minibatch's gradient: there is no norm "
            "over all stages; expected 'stage', or 'auto'"
        )
    if clip_scope == "global" and clip_norm is None:
        raise ValueError("clip_scope: 'global' needs a clip_norm")
    return clip_scope == "global"


def max_norm_at(method: Method, place: Place, clip_norm: float | None) -> float | None:
    if clip_norm is not None:
        return _positive("clip_norm", clip_norm)
    if method.clip is None:
        return None
    where = f"method: clip of {method.name!r} for stage {place.stage} of {place.stages}"
    return _positive(where, method.clip(place))


def _positive(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{where}: expected a number, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{where}: expected a number > 0, got {value}")
    return float(value)
