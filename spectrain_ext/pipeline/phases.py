"""Phases: what each phase of a method makes of the stages, and when training comes to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from spectrain_ext.method import (
    Method,
    Phase,
    check_optimizer,
    factor_of,
    phases_of,
    rules_at,
)
from spectrain_ext.operators import distance
from spectrain_ext.schedule import Kind, Place, Rules, count_stage
from spectrain_ext.weights import StageMemory, StageWeights, paced

from .arguments import clips_globally, make_optimizer, make_scheduler, max_norms_of
from .loads import Handler
from .observer import Observer
from .stage import Stage

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


class TrainingPhase(NamedTuple):
    """What a phase of the method makes of the stages.

    Attributes:
        method: the phase.
        places, rules: of all stages.
        here: the places of the stages of this process.
        weights: of these; None: a stage has none.
        max_norms: what their gradients are clipped to.
        globally: whether by the norm of all stages' gradients.
    """

    method: Method
    places: list[Place]
    rules: list[Rules]
    here: list[Place]
    weights: list[StageWeights | None]
    max_norms: list[float | None]
    globally: bool

    def memory(self) -> list[StageMemory]:
        """What each stage here holds at most in a long run."""
        return [self._memory(*each) for each in zip(self.weights, self.here, strict=True)]

    def _memory(self, weights: StageWeights | None, place: Place) -> StageMemory:
        if weights is not None:
            return weights.predicted()
        count = count_stage(self.method.schedule, self.places[0], place, Rules(), False)
        return StageMemory(0, 0, count.in_flight)


def training_phases(
    method: Method,
    of_phases: Sequence[list[Place]],
    modules: Mapping[int, nn.Module],
    copies: Callable[[int], Set[Tensor]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[Any], LRScheduler] | None,
    clip_norm: float | None,
    clip_scope: str,
    master_dtype: torch.dtype | None,
) -> list[TrainingPhase]:
    """What each phase of a method makes of the stages; every optimizer is made once.

    Args:
        method: with all of its phases.
        of_phases: the places of all stages in each.
        modules: the stages of this process, by their indices.
        copies: of a stage, the parameters that another one trains.
        optimizer, scheduler, clip_norm, clip_scope, master_dtype: as the pipeline was given them.
    """
    phases = [*zip(phases_of(method), of_phases, strict=True)]
    for phase, places in phases:  # before anything is made
        for k in modules:
            rules_at(phase, places[k])
    clips = [
        (
            max_norms_of(phase, [places[k] for k in modules], clip_norm),
            clips_globally(phase, clip_norm, clip_scope),
        )
        for phase, places in phases
    ]
    made: dict[int, torch.optim.Optimizer] = {}
    paces: dict[int, LRScheduler | None] = {}
    for k, module in modules.items():
        found = make_optimizer(optimizer, module, k, copies(k))
        if found is not None:
            factor = factor_of([(phase, places[k]) for phase, places in phases])
            made[k] = found
            paces[k] = paced(partial(make_scheduler, scheduler, k=k), factor)(found)
    unmeasured = any(p.then is not None and p.then.after is None for p, _ in phases)
    if unmeasured and 0 in modules and 0 not in made:
        raise ValueError(
            f"method: {method.name!r} changes at a gap of stages[0], which has no trainable "
            "parameters; expected after as well"
        )
    # Other processes are taken to have optimizers like this one's.
    like = next(iter(made.values()), None)

    def weights(phase: Method, places: list[Place], k: int) -> StageWeights | None:
        if k not in made:
            return None
        rules = rules_at(phase, places[k], made[k])
        check_optimizer(phase, rules, k, made[k])
        return StageWeights(
            *(modules[k], made[k], paces[k], rules, (places[0], places[k])),
            *(phase.schedule, master_dtype, copies(k)),
        )

    return [
        TrainingPhase(
            phase,
            places,
            [rules_at(phase, place, like) for place in places],
            [places[k] for k in modules],
            [weights(phase, places, k) for k in modules],
            *clip,
        )
        for (phase, places), clip in zip(phases, clips, strict=True)
    ]


def widest(places: Sequence[Sequence[Place]]) -> list[Place]:
    """The place of every stage with the largest window that it has in any phase."""
    return [max(stage, key=lambda place: place.window) for stage in zip(*places, strict=True)]


class Until:
    """Batches until a phase comes.

    Args:
        batches: the caller's.
        phase: that comes.
        minibatches: of training so far.
        gap: measures stage 0's gap, where the phase comes by one.

    Attributes:
        cut: whether no more was asked for because it has come.
    """

    def __init__(
        self, batches: Iterator[object], phase: Phase, minibatches: int, gap: Gap | None
    ) -> None:
        self._batches, self._phase, self._gap = batches, phase, gap
        self._minibatches = minibatches
        self.cut = False

    @property
    def over(self) -> bool:
        """Whether the phase has come."""
        after, most = self._phase.after, self._phase.gap
        return (after is not None and self._minibatches >= after) or (
            self._gap is not None and most is not None and self._gap.largest > most
        )

    def said(self, left: bool) -> tuple[bool, bool]:
        """Whether the phase has come, and whether a run of it follows; ``left``: by the caller."""
        return self.over, self.cut and not left

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        self.cut = self.over
        if self.cut:
            raise StopIteration
        batch = next(self._batches)
        self._minibatches += 1
        return batch


class Gap(Observer):
    """How far stage 0's weights move from a minibatch's forward to its own update.

    By the norm of the weights before that update. One minibatch at a time is looked at: that takes
    a copy of the weights, and a pass over them; the stage's prediction stream is waited for.

    Attributes:
        largest: of those looked at so far; 0 where stage 0 is in another process.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._read: tuple[int, list[Tensor]] | None = None  # by the forward of which minibatch

    def watch(self, stage: Stage, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        weights = stage.weights
        if stage.index or weights is None:
            return handlers
        given = handlers[Kind.FORWARD], handlers[Kind.UPDATE]

        def forward(i: int, j: int) -> None:
            if self._read is None and i > 0 and j == 0:  # the first of a run is never late
                with stage.looking():
                    pairs = zip(weights.params, weights.newest(), strict=True)
                    self._read = i, [torch.empty_like(now).copy_(p) for p, now in pairs]
            given[0](i, j)

        def update(i: int, j: int) -> None:
            if self._read is not None and self._read[0] == i:
                with stage.looking():
                    true = weights.newest()
                    _, (norm,) = distance(true, [self._read[1]])
                    self._read = None
                    self.largest = max(self.largest, float(norm / get_total_norm(true).double()))
            given[1](i, j)

        return {**handlers, Kind.FORWARD: forward, Kind.UPDATE: update}
