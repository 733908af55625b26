"""Describes each stage for checkpoints, with tensors under the uncut model's names."""

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
from spectrain_ext.pipeline.names import bare, copied_buffers, full_names
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.pipeline.ties import Copy, names_of
from spectrain_ext.rng import StageRandom

from .documents import Json, Keep, encode


class Stateful(Protocol):
    """An object with state to save, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in JSON types and tuples."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Restore a state from ``state_dict``."""


class Item:
    """A piece of a checkpoint's state, to save and to load."""

    what: str  # description for errors
    key = ""  # prefix of its tensors' names; "": it has no tensors

    def state(self) -> Any:
        """Return the present state: tensors, numbers and containers of them."""
        raise NotImplementedError

    def saved(self, keep: Keep) -> Any:
        """Return the state as JSON for a document, and pass its tensors to ``keep``."""
        where = self.what.removeprefix("the ")
        return encode(self.state(), where, keep if self.key else None, self.key)

    def match(self, body: Json) -> Any:
        """Return this item's part of a document; ValueError if it does not fit. Changes nothing."""
        raise NotImplementedError

    def put(self, state: Any) -> None:
        """Load a result of ``match``, with its tensors, or of ``state``."""
        raise NotImplementedError

    def undo(self) -> Callable[[], object]:
        """Return a function that restores the present state."""
        return partial(self.put, copy.deepcopy(self.state()))


@dataclass(frozen=True)
class Part:
    """One stage, or an uncut model."""

    stage: int
    module: nn.Module
    names: Mapping[str, str]  # the model's name of each key of the module's ``state_dict``
    optimizer: torch.optim.Optimizer | None
    scheduler: Stateful | None
    random: StageRandom | None  # None: it uses the process's generators
    # float32 weights that the optimizer updates in the place of narrower parameters
    masters: Mapping[Tensor, Tensor] = field(default_factory=dict)
    replica: int = 0  # the first replica's weights are saved
    replicas: int = 1
    averaged: Averaged | None = None  # averages its weights over replicas
    # names of tensors that an earlier stage saves, with their names there
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def tensors(self, saved: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers under the model's names."""
        # Without keep_vars a model warns if other processes have trained stages of it.
        for key, value in self.module.state_dict(keep_vars=not saved).items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"stage {self.stage}: {key!r} in its state_dict is a {type(value).__name__}; a "
                    "checkpoint holds tensors only"
                )
            yield self.names[key], value.detach()

    def parameter_names(self) -> dict[Tensor, str]:
        """Return the model's name of every parameter, the first one if it has several."""
        return {p: self.names[name] for name, p in self.module.named_parameters()}

    def as_saved(self, body: Json) -> Json | None:
        """Return a document's entry of this stage; None if its parameters differ."""
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
    bind: bool = False,  # recreate masters that were released
) -> list[Part]:
    """Return the parts of a pipeline, or a module as the only part."""
    if not isinstance(target, Pipeline):
        names = _names(target, "")
        tied = _copied(target, names) if first_stage else {}
        return [Part(first_stage or 0, target, names, optimizer, scheduler, None, tied=tied)]
    if optimizer is not None or scheduler is not None:
        raise ValueError("optimizer, scheduler: a pipeline has its own, expected None")
    target.check_drained("a checkpoint")
    ahead = 0 if first_stage is None else first_stage - target.first_stage
    if bind:
        target.masters(bind)
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
    modules = {at.index: at.module for at in target._executor.stages}

    def names_elsewhere(copy: Copy) -> Sequence[str]:
        if copy.original is None:  # its rank has sent the names
            return copy.names_elsewhere
        home = modules[copy.home]
        keys = names_of(home)[copy.original]
        return [*full_names(home, keys, f"{ahead + copy.home}.").values()]

    known: set[str] = set()  # names in earlier stages
    for at in target._executor.stages:
        k, module, weights, stage = at.index, at.module, at.weights, ahead + at.index
        copies, names = target.copied(k), _names(module, f"{stage}.")
        buffers = _copied(module, names)
        if not isinstance(target, DistributedPipeline):  # another module may replace the stage
            buffers = {name: there for name, there in buffers.items() if name in known}
        known.update(names.values())
        parts.append(
            Part(
                stage,
                module,
                names,
                None if weights is None else weights.optimizer,
                None if weights is None else weights.scheduler,
                at.random,
                {} if weights is None else weights.masters(),
                replica,
                replicas,
                averaged.get(k),
                {names[key]: names_elsewhere(c) for c in copies.values() for key in c.names}
                | buffers,
            )
        )
    return parts


def _copied(module: nn.Module, names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of buffers that an earlier stage saves."""
    copied = copied_buffers(module)
    return {name: [name] for key, name in names.items() if bare(key) in copied}


def _names(module: nn.Module, prefix: str) -> dict[str, str]:
    keys = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    keys += module.state_dict(keep_vars=True).keys()
    return full_names(module, keys, prefix)
