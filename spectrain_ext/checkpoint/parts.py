"""Saves the weights of each stage, under the uncut model's names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spectrain_ext.distributed.pipeline import DistributedPipeline
from spectrain_ext.errors import differing, kind_of
from spectrain_ext.passes import AverageWeights, averagers
from spectrain_ext.pipeline.names import bare, full_names
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.pipeline.ties import Copy, names_of
from spectrain_ext.rng import StageRandom

from .documents import Json, Keep, dtype_of, encode
from .storage import WEIGHTS

_MASTERS = "master."
_EXTRA = "_extra_state"  # of get_extra_state

_Place = tuple[int, torch.Size, tuple[int, ...]]  # of a tensor in memory


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
    averaged: AverageWeights | None = None  # averages its weights over replicas
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
    bind: bool = False,  # recreate masters that were released
) -> list[Part]:
    """Return the parts of a pipeline, or a module as the only part."""
    if not isinstance(target, Pipeline):
        return [Part(0, target, _names(target, ""), optimizer, scheduler, None)]
    if optimizer is not None or scheduler is not None:
        raise ValueError("optimizer, scheduler: a pipeline has its own, expected None")
    target.check_drained("a checkpoint")
    if bind:
        target.masters(bind)
    replica, replicas = 0, 1
    averaged = averagers(target._executor.stages)
    if averaged and not isinstance(target, DistributedPipeline):
        raise ValueError(
            "a pipeline that is averaged side by side with others has a part of the state; "
            "checkpoints are for DistributedPipeline"
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
        return [*full_names(home, keys, f"{copy.home}.").values()]

    known: set[str] = set()  # names in earlier stages
    for at in target._executor.stages:
        k, module, weights = at.index, at.module, at.weights
        copies, names = target.copied(k), _names(module, f"{k}.")
        buffers = _copied(module, names)
        if not isinstance(target, DistributedPipeline):  # another module may replace the stage
            buffers = {name: there for name, there in buffers.items() if name in known}
        known.update(names.values())
        parts.append(
            Part(
                k,
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
    copied: Container[str] = getattr(module, "copied_buffers", ())
    return {name: [name] for key, name in names.items() if bare(key) in copied}


def _names(module: nn.Module, prefix: str) -> dict[str, str]:
    keys = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    keys += module.state_dict(keep_vars=True).keys()
    return full_names(module, keys, prefix)


# Weights


class Weights(Item):
    """The weights of one stage."""

    def __init__(self, part: Part) -> None:
        self.what = f"stage {part.stage}"
        self._part = part

    def saved(self, keep: Keep) -> Json:
        names, tied, left = self._part.parameter_names(), self._part.tied, self._not_taken_back()
        if left:
            warnings.warn(
                f"{self.what}: {listed(left)} are not saved: they are frozen, and their modules "
                "refuse to load them; load keeps the values of the model that it loads into",
                stacklevel=2,
            )
        weights = {
            name: keep(WEIGHTS + name, tensor)
            for name, tensor in self._part.tensors(saved=True)
            # an earlier stage saves a tied one under this name
            if name not in left and name not in tied.get(name, ())
        }
        masters = {}
        for p, master in self._part.masters.items():  # follows p where that has changed since a run
            now = p.detach()
            same = master.to(now.dtype) == now
            followed = torch.where(same, master, now.to(master.dtype))
            masters[names[p]] = keep(_MASTERS + names[p], followed)
        return {
            "left_out": left,
            "parameters": list(names.values()),
            "weights": weights,
            "masters": masters,
        }

    def match(self, body: Json) -> list[Any]:
        """Check shapes and kinds of numbers, and choose between saved weights and masters."""
        saved = _Saved(body)
        left = {*saved.left_out, *self._not_taken_back()}
        self._keeps = [name for name, _ in self._part.tensors() if name in left]
        if self._keeps:
            warnings.warn(
                f"{self.what}: {listed(self._keeps)} keep their present values: they are frozen, "
                "and their modules refuse to load them",
                stacklevel=2,
            )
        sources: dict[str, Json] = {}  # by key of the module's state_dict
        places: dict[_Place, list[str]] = {}  # the keys of one tensor
        aliases: dict[_Place, list[str]] = {}  # its names
        wide: dict[_Place, Json] = {}
        for (name, tensor), key in zip(
            self._part.tensors(), self._part.module.state_dict(keep_vars=True), strict=True
        ):
            if name in left:
                continue
            if name not in saved.weights:
                raise ValueError(f"has no {name!r}, which {self.what} has")
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            aliases.setdefault(place, []).extend((*self._part.tied.get(name, ()), name))
            # Tied weights have one master, under the home's name.
            name = next((n for n in self._part.tied.get(name, ()) if n in saved.weights), name)
            saved.check(name, tensor)
            sources[key], is_master = saved.source(name, tensor.dtype)
            places.setdefault(place, []).append(key)
            if is_master:
                wide.setdefault(place, sources[key])
        for names in aliases.values():
            saved.check_alike(names)
        for place, source in wide.items():
            sources.update(dict.fromkeys(places[place], source))
        names_of = self._part.parameter_names()
        masters = [
            saved.source(names_of[p], master.dtype)[0] for p, master in self._part.masters.items()
        ]
        # pairs, because a name may begin with "$"
        return [[[key, source] for key, source in sources.items()], masters]

    def put(self, state: Any) -> None:
        weights, masters = state
        self._part.module.load_state_dict(dict(weights), strict=not self._keeps)
        for master, value in zip(self._part.masters.values(), masters, strict=True):
            master.copy_(value)

    def _not_taken_back(self) -> list[str]:
        names = self._part.names
        return [names[key] for key in _not_taken_back(self._part.module, self.what)]

    def undo(self) -> Callable[[], None]:
        """Return a function that restores CPU copies directly, without the module's hooks."""
        held = [*(tensor for _, tensor in self._part.tensors()), *self._part.masters.values()]
        before = [tensor.detach().to("cpu", copy=True) for tensor in held]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, value in zip(held, before, strict=True):
                    tensor.copy_(value)

        return put_back


class _Saved:
    """The weights and masters of all stages of a document."""

    def __init__(self, body: Json) -> None:
        self._tensors = body["tensors"]
        self.weights = weights_of({"stages": [*body.get("of_all_stages", ()), *body["stages"]]})
        self.left_out = [name for s in body["stages"] for name in s["left_out"]]
        self._masters: Json = {k: v for s in body["stages"] for k, v in s["masters"].items()}

    def _entries(self, name: str) -> list[Json]:
        references = [saved[name] for saved in (self.weights, self._masters) if name in saved]
        return [self._tensors[reference["$tensor"]] for reference in references]

    def check(self, name: str, tensor: Tensor) -> None:
        for entry in self._entries(name):
            if entry["shape"] != list(tensor.shape):
                raise ValueError(
                    f"{name!r} has shape {entry['shape']}, expected {list(tensor.shape)}"
                )
            if kind_of(dtype_of(entry["dtype"])) != kind_of(tensor.dtype):
                raise ValueError(
                    f"{name!r} is {entry['dtype']}, which does not fit into "
                    f"{str(tensor.dtype).removeprefix('torch.')}"
                )

    def check_alike(self, names: Iterable[str]) -> None:
        """Raise ValueError if the saved tensors with these names, or their masters, differ."""
        for saved in (self.weights, self._masters):
            entries = {n: self._tensors[saved[n]["$tensor"]] for n in names if n in saved}
            first = next(iter(entries), "")
            for name, entry in entries.items():
                if any(entry[key] != entries[first][key] for key in ("dtype", "sha256")):
                    raise ValueError(differing(first, name))

    def source(self, name: str, dtype: torch.dtype) -> tuple[Json, bool]:
        """Return a saved tensor and whether it is a master, used if the weight is too narrow."""
        narrow = dtype_of(self._entries(name)[0]["dtype"]).itemsize < dtype.itemsize
        is_master = narrow and name in self._masters
        return (self._masters if is_master else self.weights)[name], is_master


def weights_of(body: Json) -> Json:
    """Return the references of all weights in a document, by the model's names."""
    return {name: found for stage in body["stages"] for name, found in stage["weights"].items()}


def _not_taken_back(module: nn.Module, where: str) -> list[str]:
    """Return keys of frozen tensors that a part of the module gives but refuses to load.

    Quantized layers do so: what they give is packed, with its scales under more names.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    parts: dict[str, list[str]] = {}
    given = module.state_dict(keep_vars=True)  # without a warning, see ``Part.tensors``
    for key in given:
        path = key.rpartition(".")[0]
        while path not in modules:  # such as "0.weight" of "0.weight.absmax"
            path = path.rpartition(".")[0]
        parts.setdefault(path, []).append(key)
    found = []
    for path, keys in parts.items():
        part = modules[path]
        held = {**part._parameters, **part._buffers}
        names = [key[len(path) + 1 if path else 0 :] for key in keys]
        unusual = [
            key
            for key, name in zip(keys, names, strict=True)
            if name != _EXTRA and not _fits(held.get(name), given[key])
        ]
        if not unusual or _takes_back(part):
            continue
        own = list(part.parameters(recurse=False))
        trained = {name for name, p in part.named_parameters() if p.requires_grad}
        if own and all(p.requires_grad for p in own):
            raise TypeError(
                f"{where}: {type(part).__name__} refuses to load {unusual[0]!r}, which its "
                "state_dict() has, and its weights are trained; it cannot be saved"
            )
        found += [key for key, name in zip(keys, names, strict=True) if name not in trained]
    return found


def _fits(held: Tensor | None, given: Tensor) -> bool:
    return held is not None and held.shape == given.shape and held.dtype == given.dtype


def _takes_back(part: nn.Module) -> bool:
    """Return whether a module loads its own state, which does not change it."""
    try:
        part.load_state_dict(part.state_dict())
    except Exception:  # of any kind, as the module may be anybody's
        return False
    return True


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
