"""Sets up the stages for each phase of a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from spectrain_ext.method import Method, check_optimizer, factor_of, phases_of, rules_at
from spectrain_ext.schedule import Place, Rules, count_stage, flushes
from spectrain_ext.weights import StageMemory, StageWeights

from .arguments import clips_globally, make_optimizer, make_scheduler, max_norms_of

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


class TrainingPhase(NamedTuple):
    method: Method
    places: list[Place]  # of all stages; so are the rules
    rules: list[Rules]
    here: list[Place]  # of the stages of this process; so is what follows
    weights: list[StageWeights | None]  # None: a stage without trainable parameters
    max_norms: list[float | None]  # the largest gradient norms
    globally: bool  # whether by the norm of all stages' gradients

    @property
    def flushes(self) -> bool:
        return flushes(self.method.schedule)

    def memory(self) -> Iterator[StageMemory]:
        for weights, place in zip(self.weights, self.here, strict=True):
            if weights is not None:
                yield weights.predicted()
            else:
                count = count_stage(self.method.schedule, self.places[0], place, Rules(), False)
                yield StageMemory(0, 0, count.in_flight)


@dataclass(frozen=True)
class Training:
    method: Method
    of_phases: Sequence[list[Place]]
    modules: Mapping[int, nn.Module]  # of this process, by index
    # Of a stage: its parameters that another stage trains.
    copies: Callable[[int], Mapping[nn.Parameter, object]]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    scheduler: Callable[[Any], LRScheduler] | None
    master_dtype: torch.dtype | None

    @property
    def _phases(self) -> list[tuple[Method, list[Place]]]:
        return [*zip(phases_of(self.method), self.of_phases, strict=True)]

    def _factor(self, k: int) -> Callable[[int], float] | None:
        return factor_of([(phase, places[k]) for phase, places in self._phases])

    def rules(self, optimizer: torch.optim.Optimizer | None) -> list[list[Rules]]:
        """Return the rules of all stages for each phase, assuming optimizers like this."""
        return [[rules_at(p, place, optimizer) for place in places] for p, places in self._phases]

    def check(self, k: int, optimizer: torch.optim.Optimizer) -> None:
        if self._factor(k) is not None:
            for index, group in enumerate(optimizer.param_groups):
                if group.get("lr") is None:
                    raise ValueError(
                        f"optimizer: parameter group {index} of the {type(optimizer).__name__} of "
                        f"stages[{k}] has no 'lr' that method {self.method.name!r} could multiply; "
                        "set it, or choose a method without rates"
                    )
        for phase, places in self._phases:
            check_optimizer(phase, rules_at(phase, places[k], optimizer), k, optimizer)

    def weights(
        self, k: int, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
    ) -> list[StageWeights]:
        """Return stage k's weights in each phase."""
        return [
            StageWeights(
                self.modules[k],
                optimizer,
                scheduler,
                rules_at(phase, places[k], optimizer),
                (places[0], places[k]),
                phase.schedule,
                self.master_dtype,
                self.copies(k).keys(),
                self._factor(k),
            )
            for phase, places in self._phases
        ]

    def phases(self, clip_norm: float | None, clip_scope: str) -> list[TrainingPhase]:
        """Return how each phase trains the stages; every optimizer is made once."""
        phases, here = self._phases, list(self.modules)
        self.rules(None)  # raises errors before anything is made
        clips = [
            (
                max_norms_of(phase, [places[k] for k in here], clip_norm),
                clips_globally(phase, clip_norm, clip_scope),
            )
            for phase, places in phases
        ]
        made: dict[int, torch.optim.Optimizer] = {}
        schedulers: dict[int, LRScheduler | None] = {}
        for k in here:
            found = make_optimizer(self.optimizer, self.modules[k], k, self.copies(k).keys())
            if found is not None:
                made[k], schedulers[k] = found, make_scheduler(self.scheduler, found, k)
        unmeasured = any(p.then is not None and p.then.after is None for p, _ in phases)
        if unmeasured and 0 in here and 0 not in made:
            raise ValueError(
                f"method: {self.method.name!r} changes at a gap of stages[0], which has no "
                "trainable parameters; expected after as well"
            )
        weights: dict[int, Sequence[StageWeights | None]] = {k: [None] * len(phases) for k in here}
        for k, optimizer in made.items():
            self.check(k, optimizer)
            weights[k] = self.weights(k, optimizer, schedulers[k])
        rules = self.rules(next(iter(made.values()), None))
        return [
            TrainingPhase(
                *(phase, places, rules[n], [places[k] for k in here]),
                *([weights[k][n] for k in here], *clips[n]),
            )
            for n, (phase, places) in enumerate(phases)
        ]


def widest(places: Sequence[Sequence[Place]]) -> list[Place]:
    """Return each stage's place in the phase in which its window is largest."""
    return [max(stage, key=lambda place: place.window) for stage in zip(*places, strict=True)]
