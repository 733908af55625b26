"""Phases: what each phase of a method makes of the stages, and when training comes to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from spectrain_ext.method import Method, Phase, check_optimizer, factor_of, rules_at
from spectrain_ext.operators import distance
from spectrain_ext.schedule import Kind, Place, Rules, count_stage
from spectrain_ext.weights import StageMemory, StageWeights, paced

from .arguments import make_optimizer, make_scheduler
from .loads import Handler
from .observer import Observer
from .stage import Stage

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


class Trained(NamedTuple):
    """What trains a stage in all phases.

    Attributes:
        module: the stage's.
        copies: its parameters that another stage trains.
        optimizer: of its other parameters.
        scheduler: of the optimizer, if there is one.
    """

    module: nn.Module
    copies: Set[Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        copies: Set[Tensor],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[Any], LRScheduler] | None,
        phases: Sequence[tuple[Method, Place]],
    ) -> Trained | None:
        """What trains a stage, of its place in each phase; None: it trains no parameters."""
        k = phases[0][1].stage
        opt = make_optimizer(optimizer, module, k, copies)
        if opt is None:
            return None
        make = paced(partial(make_scheduler, scheduler, k=k), factor_of(phases))
        return cls(module, copies, opt, make(opt))

    def weights(
        self, phase: Method, places: tuple[Place, Place], master_dtype: torch.dtype | None
    ) -> StageWeights:
        """The stage's weights in a phase, at its place after stage 0's."""
        rules = rules_at(phase, places[1], self.optimizer)
        check_optimizer(phase, rules, places[1].stage, self.optimizer)
        return StageWeights(
            self.module,
            self.optimizer,
            self.scheduler,
            rules,
            places,
            phase.schedule,
            master_dtype,
            self.copies,
        )


class Regime(NamedTuple):
    """What a phase of the method makes of the stages.

    Attributes:
        method: the phase.
        places: of all stages.
        rules: likewise.
        weights: of the stages of this process; None: a stage has none.
        max_norms: what their gradients are clipped to.
        globally: whether by the norm of all stages' gradients.
    """

    method: Method
    places: list[Place]
    rules: list[Rules]
    weights: list[StageWeights | None]
    max_norms: list[float | None]
    globally: bool

    @classmethod
    def of(
        cls,
        phase: Method,
        places: list[Place],
        trained: Mapping[int, Trained | None],
        max_norms: list[float | None],
        globally: bool,
        like: torch.optim.Optimizer | None,
        master_dtype: torch.dtype | None,
    ) -> Regime:
        """What it makes of what trains the stages of this process, by their indices.

        ``like`` is an optimizer like those of other processes.
        """
        weights = [
            None if found is None else found.weights(phase, (places[0], places[k]), master_dtype)
            for k, found in trained.items()
        ]
        rules = [rules_at(phase, place, like) for place in places]
        return cls(phase, places, rules, weights, max_norms, globally)

    def memory(self, weights: StageWeights | None, place: Place) -> StageMemory:
        """What a stage at this place holds at most in a long run; None: it has no weights."""
        if weights is not None:
            return weights.predicted()
        count = count_stage(self.method.schedule, self.places[0], place, Rules(), False)
        return StageMemory(0, 0, count.in_flight)


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
