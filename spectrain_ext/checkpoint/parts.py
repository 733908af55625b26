"""Part: one stage as a checkpoint sees it, its tensors under the names of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spectrain_ext.distributed.pipeline import DistributedPipeline
from spectrain_ext.pipeline.averaging import Averaged
from spectrain_ext.pipeline.names import full_names
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.pipeline.ties import Copy, names_of
from spectrain_ext.rng import StageRandom

from .documents import Json, Keep, encode


class Stateful(Protocol):
    """A learning-rate scheduler or the like, as far as a checkpoint is concerned."""

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` takes: JSON's types and tuples."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Go on from there."""


class Item:
    """Some of the state that a checkpoint holds, in both directions."""

    what: str  # in errors
    key = ""  # what the names of its tensors begin with; "": it has none

    def state(self) -> Any:
        """Return the state of now: tensors, numbers, and containers of them."""
        raise NotImplementedError

    def saved(self, keep: Keep) -> Any:
        """Return what a document has of it; ``keep`` takes the tensors of state that has some."""
        where = self.what.removeprefix("the ")
        return encode(self.state(), where, keep if self.key else None, self.key)

    def match(self, body: Json) -> Any:
        """Return what belongs here of a document, ValueError unless it fits; nothing is changed."""
        raise NotImplementedError

    def put(self, state: Any) -> None:
        """Put in place what ``match`` has returned, with its tensors, or what ``state`` has."""
        raise NotImplementedError

    def undo(self) -> Callable[[], object]:
        """Return what puts the state of now back."""
        return partial(self.put, copy.deepcopy(self.state()))


@dataclass(frozen=True)
class Part:
    """One stage, or a whole model that is not cut."""

    stage: int
    module: nn.Module
    names: Mapping[str, str]  # what the whole model calls each key of the module's ``state_dict``
    optimizer: torch.optim.Optimizer | None
    scheduler: Stateful | None
    random: StageRandom | None  # None: it uses the process's generators
    # Wider weights of narrow parameters, which an optimizer updates instead.
    masters: Mapping[Tensor, Tensor] = field(default_factory=dict)
    replica: int = 0  # the first one speaks for all
    replicas: int = 1
    averaged: Averaged | None = None  # what averages its weights with the other replicas'
    # Of parameters that an earlier stage trains, the names here and what they are there.
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers under the model's names."""
        for key, value in self.module.state_dict().items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"stage {self.stage}: {key!r} in its state_dict is a {type(value).__name__}; a "
                    "checkpoint holds tensors only"
                )
            yield self.names[key], value

    def parameter_names(self) -> dict[Tensor, str]:
        """Return the model's name of every parameter; of several, the first."""
        return {p: self.names[name] for name, p in self.module.named_parameters()}

    def as_saved(self, body: Json) -> Json | None:
        """Return what a document has of this stage, None if that had other parameters."""
        names = list(self.parameter_names().values())
        return next(
            (s for s in body["stages"] if s["stage"] == self.stage and s["parameters"] == names),
            None,
        )


def parts_of(
    target: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    first_stage: int | None = None,
    bind: bool = False,  # masters that were given up are there again
) -> list[Part]:
    """Return the stages of a pipeline, or a model as the only one."""
    if not isinstance(target, Pipeline):
        names = _names(target, "")
        return [Part(first_stage or 0, target, names, optimizer, scheduler, None)]
    if optimizer is not None or scheduler is not None:
        raise ValueError("optimizer, scheduler: a pipeline has its own, expected None")
    target.check_drained("a checkpoint")
    ahead = 0 if first_stage is None else first_stage - target.first_stage
    masters = target.masters(bind)
    replica, replicas = 0, 1
    averaged = target._executor.connections.averaged
    if averaged and not isinstance(target, DistributedPipeline):
        raise ValueError(
            "a pipeline that is averaged side by side with others has a part of the state; "
            "checkpoints are for DistributedPipeline(..., averaging=...)"
        )
    if isinstance(target, DistributedPipeline):
        replica, replicas = target.replica, target.replicas[target.first_stage]
    parts = []
    optimizers = list(target.optimizers)
    schedulers = {id(s.optimizer): s for s in target.schedulers}
    modules = {at.stage: each for at, each in zip(target.places, target.children(), strict=True)}

    def elsewhere(copy: Copy) -> Sequence[str]:
        if copy.original is None:  # whose rank has said
            return copy.elsewhere
        home = modules[copy.home]
        keys = names_of(home)[copy.original]
        return [*full_names(home, keys, f"{ahead + copy.home}.").values()]

    for (k, module), random in zip(modules.items(), target.random, strict=True):
        stage = ahead + k
        copies, names = target.copied(k), _names(module, f"{stage}.")
        own = set(module.parameters()) - copies.keys()
        found = next((o for o in optimizers if not own.isdisjoint(_first(o))), None)
        parts.append(
            Part(
                stage,
                module,
                names,
                found,
                schedulers.get(id(found)),
                random,
                {p: master for p, master in masters.items() if p in own},
                replica,
                replicas,
                averaged.get(k),
                {names[key]: elsewhere(c) for c in copies.values() for key in c.names},
            )
        )
    return parts


def _first(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """One of its parameters; a group may have none."""
    return [p for group in optimizer.param_groups for p in group["params"]][:1]


def _names(module: nn.Module, prefix: str) -> dict[str, str]:
    keys = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    keys += module.state_dict().keys()
    return full_names(module, keys, prefix)
