"""Saves the weights of each stage, under the uncut model's names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from spectrain_ext.distributed.pipeline import DistributedPipeline
from spectrain_ext.errors import differing, kind_of
from spectrain_ext.passes import AverageWeights, averagers
from spectrain_ext.pipeline.names import bare, full_names
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.pipeline.ties import Copy, copies_in, names_of
from spectrain_ext.rng import StageRandom
from spectrain_ext.weights.storage import local_part, whole

from .documents import Json, Keep, dtype_of, encode
from .sharded import part_like
from .storage import WEIGHTS, described

_MASTERS = "master."

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
class Part:
    """One stage, or an uncut model."""

    stage: int
    module: nn.Module
    names: Mapping[str, str]  # the model's name of each key of the module's ``state_dict``
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    random: StageRandom | None = None  # None: it uses the process's generators
    # float32 weights that the optimizer updates in the place of narrower parameters
    masters: Mapping[Tensor, Tensor] = field(default_factory=dict)
    replica: int = 0  # the first replica's weights are saved
    replicas: int = 1
    averaged: AverageWeights | None = None  # averages its weights over replicas
    # names of tensors that an earlier stage saves, with their names there
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    trainable_only: TrainableOnly = False
    # Several ranks may share it by tensor parallelism: the index of this one, and how many.
    shard: int = 0
    shards: int = 1
    # While loading: the parameters that are cut as the tensors with these keys will be.
    cuts: dict[str, Tensor] = field(default_factory=dict)
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
    stages, over_ranks = target._executor.stages, isinstance(target, DistributedPipeline)
    averaged = averagers(stages)
    replica, replicas, shard, shards = 0, 1, 0, 1
    if isinstance(target, DistributedPipeline):
        replica, replicas = target.replica, target.replicas[stages[0].index]
        of = target._processes.replicas
        shard, shards = of.shard_of(target.rank), len(of.rows[0])
    elif averaged:
        raise ValueError(
            "a pipeline that is averaged side by side with others has a part of the state; "
            "checkpoints are for DistributedPipeline"
        )
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
        buffers = getattr(module, "copied_buffers", ())  # that an earlier stage saves
        for key, name in names.items():
            # in one process another module may replace the earlier stage
            if bare(key) in buffers and (over_ranks or name in known):
                tied[name] = [name]
        known.update(names.values())
        parts.append(
            Part(
                k,
                module,
                names,
                None if weights is None else weights.optimizer,
                None if weights is None else weights.scheduler,
                stage.random,
                {} if weights is None else weights.masters(),
                replica,
                replicas,
                averaged.get(k),
                tied,
                shard=shard,
                shards=shards,
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


# Weights


class Weights(Item):
    """The weights of one stage."""

    def __init__(self, part: Part) -> None:
        self.what = f"stage {part.stage}"
        self._part = part

    def saved(self, keep: Keep) -> Json:
        part = self._part
        names, tied, left = part.parameter_names(), part.tied, self._not_taken_back()
        base: dict[str, Json] = {}
        if part.trainable_only:
            frozen, by_value = self._frozen() | {*left}, part.trainable_only == "verified"
            left_out = ((n, t) for n, t in part.tensors(saved=True) if n in frozen)
            for name, tensor in left_out:
                base[name] = described(tensor)
                if by_value:
                    part.by_value.append((name, base[name], tensor))
            left = []
        if left:
            warnings.warn(
                f"{self.what}: {listed(left)} are not saved: they are frozen, and their modules "
                "refuse to load them; load keeps the values of the model that it loads into",
                stacklevel=2,
            )
        weights = {
            name: keep(WEIGHTS + name, tensor)
            for name, tensor in part.tensors(saved=True)
            # an earlier stage saves a tied one under this name
            if name not in base and name not in left and name not in tied.get(name, ())
        }
        masters, owners = {}, part.parameters()
        for p, master in part.masters.items():  # follows p where that has changed since a run
            now = p.detach()
            same = master.to(now.dtype) == now
            followed = torch.where(same, master, now.to(master.dtype))
            masters[names[p]] = keep(_MASTERS + names[p], part_like(followed, owners[p]))
        return {
            "left_out": left,
            "parameters": list(names.values()),
            "weights": weights,
            "masters": masters,
        } | ({"base": base} if part.trainable_only else {})

    def match(self, body: Json) -> list[Any]:
        """Check shapes and kinds of numbers, and choose between saved weights and masters."""
        part = self._part
        stages = [*body.get("of_all_stages", ()), *body["stages"]]
        weights = weights_of({"stages": stages})
        masters = {name: key for stage in body["stages"] for name, key in stage["masters"].items()}
        left = {name for stage in body["stages"] for name in stage["left_out"]}
        self._base = base_of({"stages": stages})
        kept = left | {*self._not_taken_back()} if self._base is None else self._base.keys()
        self._keeps = [name for name, _ in part.tensors() if name in kept]
        if self._keeps and self._base is None:
            warnings.warn(
                f"{self.what}: {listed(self._keeps)} keep their present values: they are frozen, "
                "and their modules refuse to load them",
                stacklevel=2,
            )

        def source(names: Sequence[str], tensor: Tensor, p: Tensor) -> Json:
            """Return the saved tensor for one, of the whole shape of p, that has these names."""
            for saved in (weights, masters):
                entries = {n: body["tensors"][saved[n]["$tensor"]] for n in names if n in saved}
                for name, entry in entries.items():
                    _check_fits(name, entry, tensor, p.shape)
                    first = next(iter(entries))
                    if any(entry[key] != entries[first][key] for key in ("dtype", "sha256")):
                        raise ValueError(differing(first, name))
            name = next(name for name in names if name in weights)
            dtype = dtype_of(body["tensors"][weights[name]["$tensor"]]["dtype"])
            wide = [masters[name] for name in names if name in masters]
            chosen: Json = weights[name]
            if wide and dtype.itemsize < tensor.dtype.itemsize:
                chosen = wide[0]
            part.cuts[chosen["$tensor"]] = p
            return chosen

        # each tensor of the module, with its keys in the ``state_dict`` and its names in the model
        tensors: dict[object, tuple[Tensor, list[str], list[str]]] = {}
        for (name, tensor), key in zip(
            part.tensors(), part.module.state_dict(keep_vars=True), strict=True
        ):
            if self._base is not None and name in self._base:
                _check_base(name, self._base[name], tensor)
                if "sha256" in self._base[name]:
                    part.by_value.append((name, self._base[name], tensor))
            if name in kept:
                continue
            if name not in weights:
                raise ValueError(f"has no {name!r}, which {self.what} has")
            here = local_part(tensor)
            address = here.data_ptr() if here.numel() else key  # all empty ones have the address 0
            place = (address, tensor.dtype, tensor.shape, tensor.stride())
            _, keys, names = tensors.setdefault(place, (tensor, [], []))
            keys.append(key)
            names += (*part.tied.get(name, ()), name)
        sources: list[Any] = []  # pairs, because a name may begin with "$"
        for tensor, keys, names in tensors.values():
            saved = source(names, tensor, tensor)
            sources += [[key, saved] for key in keys]
        names_of, owners = part.parameter_names(), part.parameters()
        masters_here = part.masters.items()
        return [sources, [source([names_of[p]], m, owners[p]) for p, m in masters_here]]

    def put(self, state: Any) -> None:
        pieces, masters = state
        held = self._part.module.state_dict(keep_vars=True)
        weights = {key: part_like(piece, held[key]) for key, piece in pieces}
        if self._base is None:
            self._part.module.load_state_dict(weights, strict=not self._keeps)
        else:  # some modules of a quantized base cannot load a part of their state
            with torch.no_grad():
                for key, value in weights.items():
                    held[key].copy_(value)
        for master, value in zip(self._part.masters.values(), masters, strict=True):
            master.copy_(value)

    def _given(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield each module in the stage, the prefix of its names, and what it gives to save."""
        for path, module in self._part.module.named_modules(remove_duplicate=False):
            given: dict[str, Any] = {}
            module._save_to_state_dict(given, "", keep_vars=True)
            yield f"{path}." if path else "", module, given

    def _frozen(self) -> set[str]:
        """Return the names of frozen parameters and of constant buffers."""
        keys: list[str] = []
        for prefix, module, given in self._given():
            # Training changes no packed weights, masks and indices, nor the scales beside them.
            is_constant = any(map(_is_packed, given.values()))
            for name in given:
                p = module._parameters.get(name)
                if is_constant if p is None else not p.requires_grad:
                    keys.append(prefix + name)
        return {self._part.names[key] for key in keys if key in self._part.names}

    def _not_taken_back(self) -> list[str]:
        """Return frozen tensors that a part of the module gives but refuses to load.

        Quantized layers do so: what they give is packed, with its scales under more names.
        """
        left: list[str] = []
        for prefix, module, given in self._given():
            held: dict[str, Any] = {**module._parameters, **module._buffers}
            unusual = [
                name
                for name, value in given.items()
                if name != "_extra_state" and _form(held.get(name)) != _form(value)
            ]
            if not unusual or _takes_back(module):
                continue
            own = [name for name, p in module._parameters.items() if p is not None]
            trained = [name for name in own if module._parameters[name].requires_grad]
            if own and own == trained:
                raise TypeError(
                    f"{self.what}: {type(module).__name__} refuses to load {unusual[0]!r}, which "
                    "its state_dict() has, and its weights are trained; it cannot be saved"
                )
            left += [self._part.names[prefix + name] for name in given if name not in trained]
        return left

    def undo(self) -> Callable[[], None]:
        """Return a function that restores CPU copies directly, without the module's hooks."""
        kept = {*self._keeps}
        held = [local_part(tensor) for name, tensor in self._part.tensors() if name not in kept]
        held += self._part.masters.values()
        before = [tensor.detach().to("cpu", copy=True) for tensor in held]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, value in zip(held, before, strict=True):
                    tensor.copy_(value)

        return put_back


def _check_fits(name: str, entry: Json, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError if a saved tensor has another shape or kind of numbers."""
    if entry["shape"] != list(shape):
        raise ValueError(f"{name!r} has shape {entry['shape']}, expected {list(shape)}")
    if kind_of(dtype_of(entry["dtype"])) != kind_of(tensor.dtype):
        raise ValueError(
            f"{name!r} is {entry['dtype']}, which does not fit into "
            f"{str(tensor.dtype).removeprefix('torch.')}"
        )


def _check_base(name: str, entry: Json, tensor: Tensor) -> None:
    """Raise ValueError if a frozen tensor is not the one that a checkpoint was saved with."""
    try:
        _check_fits(name, entry, tensor, tensor.shape)
    except ValueError as error:
        raise ValueError(f"was saved with another base: {error}") from None


def check_values(part: Part) -> None:
    """Raise ValueError if frozen values are others; all ranks that share the stage call this."""
    for name, entry, tensor in part.by_value:
        if described(whole(tensor), by_value=True) != entry:
            raise ValueError(f"was saved with another base: {name!r} has other values here")


def check_trains(part: Part, base: Json) -> None:
    """Raise ValueError if a checkpoint with this base has the weights of other parameters."""
    named = [(part.names[key], p) for key, p in part.module.named_parameters()]
    for was, now, names in (
        ("frozen", "trained", [name for name, p in named if p.requires_grad and name in base]),
        ("trained", "frozen", [n for n, p in named if not p.requires_grad and n not in base]),
    ):
        if names:
            raise ValueError(
                f"was saved while {listed(names)} were {was}, and they are {now} here; "
                "only_model=True loads the saved weights without the optimizers"
            )


def base_of(body: Json) -> Json | None:
    """Return the entries of frozen tensors; None if the checkpoint holds their values."""
    bases = [stage["base"] for stage in body["stages"] if "base" in stage]
    return {name: entry for base in bases for name, entry in base.items()} if bases else None


def weights_of(body: Json) -> Json:
    """Return the references of all weights in a document, by the model's names."""
    return {name: found for stage in body["stages"] for name, found in stage["weights"].items()}


def _is_packed(value: object) -> bool:
    """Return whether a value is an array of integers, of booleans or of 8-bit numbers."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return value.itemsize == 1 or not (value.is_floating_point() or value.is_complex())


def _form(tensor: Tensor | None) -> object:
    return tensor is not None and (tensor.shape, tensor.dtype)


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
