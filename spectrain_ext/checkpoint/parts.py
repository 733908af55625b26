"""The parts of a checkpoint: stages, their names, and the items of state that each has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from spectrain_ext.cutting import cut_of
from spectrain_ext.pipeline.names import bare, full_names
from spectrain_ext.pipeline.passes import Pass
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.pipeline.ties import Copy, copies_in, names_of
from spectrain_ext.rng import StageRandom
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import local_part

from .documents import Json, Keep, encode

#: Whether to save only what training changes, and with a digest of the other tensors' values.
TrainableOnly = bool | Literal["verified"]


class Stateful(Protocol):
    """An object with state to save: a scheduler, or a sampler with the position in the data.

    Example:
        >>> class Reader:
        ...     line = 0
        ...     def state_dict(self):
        ...         return {"line": self.line}
        ...     def load_state_dict(self, state):
        ...         self.line = state["line"]
        >>> reader, model = Reader(), nn.Linear(2, 2)
        >>> reader.line = 7
        >>> st.checkpoint.save("checkpoint", model, sampler=reader)
        >>> resumed = Reader()
        >>> loaded = st.checkpoint.load("checkpoint", model, sampler=resumed)
        >>> resumed.line
        7
    """

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
class Taken:
    """The result of a module's own hooks on saved tensors of other names or shapes."""

    keys: Mapping[str, str]  # of its tensors that are saved with other names: the keys to give
    names: Mapping[str, str]  # the model's names of these, by their saved names
    more: Mapping[str, str]  # other keys to give, with their saved names
    made: frozenset[str]  # the model's names of what the hooks make of them
    versions: object  # the modules' versions to tell the hooks


@dataclass(frozen=True)
class Part:
    """One stage of a pipeline, or an uncut model, with its optimizer and scheduler."""

    stage: int
    module: nn.Module
    names: Mapping[str, str]  # the model's name of each key of the module's ``state_dict``
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    random: StageRandom | None = None  # None: it uses the process's generators
    # float32 weights that the optimizer updates in the place of narrower parameters
    masters: Mapping[Tensor, Tensor] = field(default_factory=dict)
    weights: StageWeights | None = None
    passes: Sequence[Pass] = ()
    replica: int = 0  # the first replica's weights are saved
    replicas: int = 1
    apart: Pass | None = None  # has replicas train on minibatches of their own
    # names of tensors that an earlier stage saves, with their names there
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    trainable_only: TrainableOnly = False
    # Several ranks may share it by tensor parallelism: the index of this one, and how many.
    shard: int = 0
    shards: int = 1
    # While loading: the parameters that are cut as the tensors with these keys will be.
    cuts: dict[str, Tensor] = field(default_factory=dict)
    taken: Taken | None = None
    # The names, entries and tensors whose values are compared: what is cut, with other ranks.
    by_value: list[tuple[str, Json, Tensor]] = field(default_factory=list)

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
        """Return the model's first name of every parameter, by what is here of it."""
        return {local_part(p): self.names[name] for name, p in self.module.named_parameters()}

    def parameters(self) -> dict[Tensor, Tensor]:
        """Return every parameter by what is here of it, which the optimizer has."""
        return {local_part(p): p for p in self.module.parameters()}

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
    bind: bool = False,  # recreate masters that were released
) -> list[Part]:
    """Return the parts of a pipeline, or a module as the only part."""
    if not isinstance(target, Pipeline):
        return [Part(0, target, _names(target, ""), optimizer, scheduler)]
    if optimizer is not None or scheduler is not None:
        raise ValueError("optimizer, scheduler: a pipeline has its own, expected None")
    target.check_drained("a checkpoint")
    if bind:
        target.masters(bind)
    stages, processes = target._wires.stages, target._processes
    counts, spans = processes.replicas.counts, len(stages) < processes.replicas.stages
    modules = {stage.index: stage.module for stage in stages}

    def names_elsewhere(copy: Copy) -> Sequence[str]:
        if copy.original is None:  # its rank has sent the names
            return copy.names_elsewhere
        home = modules[copy.home]
        keys = names_of(home)[copy.original]
        return [*full_names(home, keys, f"{copy.home}.").values()]

    parts = []
    known: set[str] = set()  # names in earlier stages
    for stage in stages:
        k, module, weights = stage.index, stage.module, stage.weights
        names = _names(module, f"{k}.")
        copies = copies_in(target._copies, k).values()
        tied = {names[key]: names_elsewhere(copy) for copy in copies for key in copy.names}
        buffers = cut_of(module).copied_buffers  # that an earlier stage saves
        for key, name in names.items():
            # in one process another module may replace the earlier stage
            if bare(key) in buffers and (spans or name in known):
                tied[name] = [name]
        known.update(names.values())
        apart = next((each for each in stage.passes if each.own_minibatches), None)
        if apart is not None and counts[k] == 1:
            raise ValueError(
                "a pipeline whose replicas are other pipelines has a part of the state; "
                "checkpoints are for DistributedPipeline"
            )
        parts.append(
            Part(
                k,
                module,
                names,
                None if weights is None else weights.optimizer,
                None if weights is None else weights.scheduler,
                stage.random,
                {} if weights is None else weights.masters(),
                weights,
                stage.every_pass,
                processes.replica,
                counts[k],
                None if weights is None else apart,
                tied,
                shard=processes.shard,
                shards=processes.shards,
            )
        )
    return parts


def check_trainable_only(value: object, target: nn.Module) -> None:
    if value not in (False, True, "verified"):
        raise ValueError(f"trainable_only: expected True, False or 'verified', got {value!r}")
    trains = isinstance(target, Pipeline) or any(p.requires_grad for p in target.parameters())
    if value and not trains:  # a pipeline's process may have frozen stages only
        raise ValueError("trainable_only: the module has no trainable parameter")


def _names(module: nn.Module, prefix: str) -> dict[str, str]:
    keys = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    keys += module.state_dict(keep_vars=True).keys()
    return full_names(module, keys, prefix)
