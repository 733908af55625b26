"""Makes the stages' optimizers, and determines how each phase of a method trains the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from spectrain_ext.method import Method, check_optimizer, factor_of, phases_of, rules_at
from spectrain_ext.schedule import Generator, Place, Rules, count_stage
from spectrain_ext.weights import StageMemory, StageWeights

from .arguments import clips_globally, make_optimizer, make_scheduler, max_norms_of
from .ties import Copy, copies_in

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


class TrainingPhase(NamedTuple):
    method: Method
    places: list[Place]  # of all stages
    rules: list[Rules]  # of all stages, assuming that they have optimizers like the first
    max_norms: list[float | None]  # the largest gradient norms, of the stages of this process
    globally: bool  # whether by the norm of all stages' gradients

    def followed_by(
        self, k: int, optimizer: torch.optim.Optimizer
    ) -> tuple[Rules, tuple[Place, Place], str | Generator]:
        """Return what ``StageWeights.follow`` takes for a stage with this optimizer."""
        place = self.places[k]
        return (
            rules_at(self.method, place, optimizer),
            (self.places[0], place),
            self.method.schedule,
        )

    def memory(self, k: int, weights: StageWeights | None) -> StageMemory:
        if weights is not None:
            return weights.predicted(*self.followed_by(k, weights.optimizer))
        count = count_stage(self.method.schedule, self.places[0], self.places[k], Rules(), False)
        return StageMemory(0, 0, count.in_flight)


def set_up(
    method: Method,
    of_phases: Sequence[list[Place]],
    modules: Mapping[int, nn.Module],  # of this process, by index
    copies: Sequence[Copy],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[Any], LRScheduler] | None,
    master_dtype: torch.dtype | None,
    clip_norm: float | None,
    clip_scope: str,
) -> tuple[list[TrainingPhase], list[StageWeights | None]]:
    """Return the method's phases, and each stage's weights; None: it has nothing to train."""
    phases = [
        TrainingPhase(
            *(phase, places, [rules_at(phase, place) for place in places]),
            max_norms_of(phase, [places[k] for k in modules], clip_norm),
            clips_globally(phase, clip_norm, clip_scope),
        )
        for phase, places in zip(phases_of(method), of_phases, strict=True)
    ]
    optimizers: dict[int, tuple[torch.optim.Optimizer, LRScheduler | None]] = {}
    for k, module in modules.items():
        made = make_optimizer(optimizer, module, k, copies_in(copies, k).keys())
        if made is not None:
            optimizers[k] = made, make_scheduler(scheduler, made, k)
    weights: list[StageWeights | None] = []
    for k, module in modules.items():
        if k not in optimizers:
            weights.append(None)
            continue
        own, its_scheduler = optimizers[k]
        factor = factor_of([(phase.method, phase.places[k]) for phase in phases])
        for index, group in enumerate(own.param_groups if factor is not None else ()):
            if group.get("lr") is None:
                raise ValueError(
                    f"optimizer: parameter group {index} of the {type(own).__name__} of "
                    f"stages[{k}] has no 'lr' that method {method.name!r} could multiply; set it, "
                    "or choose a method without rates"
                )
        for phase in phases:
            check_optimizer(phase.method, rules_at(phase.method, phase.places[k], own), k, own)
        weights.append(
            StageWeights(
                *(module, own, its_scheduler, *phases[0].followed_by(k, own)),
                *(master_dtype, copies_in(copies, k).keys(), factor),
            )
        )
    like = next((optimizer for optimizer, _ in optimizers.values()), None)
    return [
        phase._replace(rules=[rules_at(phase.method, place, like) for place in phase.places])
        for phase in phases
    ], weights


def widest(places: Sequence[Sequence[Place]]) -> list[Place]:
    """Return each stage's place in the phase in which its window is largest."""
    return [max(stage, key=lambda place: place.window) for stage in zip(*places, strict=True)]
