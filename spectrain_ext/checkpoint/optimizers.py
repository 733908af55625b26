"""Saves optimizer state by parameter names, independent of groups and cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from spectrain_ext.optim import PredictingOptimizer
from spectrain_ext.optim.state import laid_out_as

from .documents import Json, Keep, decode_at, dtype_of, encode, tensors_in
from .parts import Item, Part
from .progress import alike
from .weights import weights_of

# These select an implementation with the same results: the loading side's choice is kept.
_IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))
_NOT_OPTIONS = frozenset(("params", "param_names"))
_RATES = ("initial_lr", "gap_rate")  # options that a scheduler and a correction add to groups
# State of known optimizers that must have the parameter's shape; a scalar would be broadcast.
_ELEMENTWISE = frozenset(
    (
        *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum"),
        *("square_avg", "grad_avg", "acc_delta", "ax", "prev", "step_size", "gap_average"),
        "update_buffer",
    )
)


class OptimizerState(Item):
    """The optimizer of one stage; its state is saved and loaded per parameter."""

    key = "optimizer.state."

    def __init__(self, part: Part, optimizer: torch.optim.Optimizer) -> None:
        self.what = f"the optimizer of stage {part.stage}"
        self._part = part
        self._optimizer = optimizer
        self._names = part.parameter_names()
        self._is_ours = isinstance(optimizer, PredictingOptimizer)
        self._loose = optimizer.loose_keys if isinstance(optimizer, PredictingOptimizer) else ()
        self._is_known = self._is_ours or type(optimizer).__module__.startswith("torch.optim")

    def _params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def saved(self, keep: Keep) -> Json:
        where = self.what.removeprefix("the ")
        given = self._state_dict(where)
        indices = (index for group in given["param_groups"] for index in group["params"])
        state: Json = {}
        for p, index in zip(self._params(), indices, strict=True):
            name, entry = self._names[p], given["state"].get(index, {})
            if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
                raise TypeError(
                    f"{where}: {name}: its state is not a dict with names as keys; it cannot be "
                    "saved"
                )
            found = {
                key: encode(value, f"{where}: {name}.{key}", keep, f"{self.key}{name}.{key}")
                for key, value in entry.items()
                # SGD without momentum stores None
                if not (value is None and key in _ELEMENTWISE and self._is_known)
            }
            if found:
                state[name] = found
        groups = [
            {
                "params": [self._names[p] for p in group["params"]],
                "options": {
                    key: encode(value, f"{where}: group {g}: {key}")
                    for key, value in group.items()
                    if key not in _NOT_OPTIONS
                },
            }
            for g, group in enumerate(self._optimizer.param_groups)
        ]
        return {"class": type(self._optimizer).__name__, "groups": groups, "state": state}

    def _state_dict(self, where: str) -> Json:
        optimizer = self._optimizer
        state = optimizer.state_dict()
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if groups is None or "state" not in state or len(groups) != len(optimizer.param_groups):
            raise TypeError(
                f"{where}: the state_dict() of a {type(optimizer).__name__} has not the form of "
                "torch.optim.Optimizer's, in which state belongs to parameters; it cannot be saved"
            )
        known = {index for group in groups for index in group["params"]}
        for key in state["state"]:
            if key not in known:
                raise TypeError(
                    f"{where}: its state has {key!r}, which is no parameter's; it cannot be saved"
                )
        return dict(state)

    def match(self, body: Json) -> list[Json]:
        self._check_kind(body)
        saved = [s["optimizer"] for s in body["stages"] if s["optimizer"] is not None]
        options = {
            name: group["options"]
            for optimizer in saved
            for group in optimizer["groups"]
            for name in group["params"]
        }
        states = {name: found for optimizer in saved for name, found in optimizer["state"].items()}
        if not options.keys() & set(self._names.values()):
            raise ValueError(
                f"has no optimizer for stage {self._part.stage}; only_model=True loads without"
            )
        self._groups: list[Json] = []
        count = 0
        for number, group in enumerate(self._optimizer.param_groups):
            mine = [self._names[p] for p in group["params"]]
            where = f"group {number} of {self.what}"
            taken = _options(group, mine, options, where)
            self._groups.append({**group, **taken, "params": list(range(count, count + len(mine)))})
            count += len(mine)
        params = self._params()
        found = [states.get(self._names[p], {}) for p in params]
        for p, state in zip(params, found, strict=True):
            for key, value in state.items():
                self._check_entry(f"{self.key}{self._names[p]}.{key}", key, value, p, body)
        self._as_saved = self._kept_as_saved(body)
        return found

    def _kept_as_saved(self, body: Json) -> list[bool]:
        """Return, per parameter, whether its dtype and that of its master are as saved."""
        weights = weights_of(body)
        masters = {name for stage in body["stages"] for name in stage["masters"]}
        kept = []
        for p in self._params():
            name = self._names[p]
            entry = body["tensors"][weights[name]["$tensor"]] if name in weights else {"dtype": ""}
            alike = entry["dtype"] == str(p.dtype).removeprefix("torch.")
            kept.append(alike and (name in masters) == (p in self._part.masters))
        return kept

    def _check_entry(self, where: str, key: str, value: Any, p: Tensor, body: Json) -> None:
        entries = [body["tensors"][name] for name in tensors_in(value)]
        whole = isinstance(value, dict) and isinstance(value.get("$tensor"), str)
        shape = entries[0]["shape"] if whole else None
        if shape is None and self._is_known and key in _ELEMENTWISE:
            raise ValueError(f"{where!r} is no tensor, expected one of shape {list(p.shape)}")
        # torch's Adafactor, for example, keeps rows and columns
        is_any = key in self._loose or shape in ([], [1])
        fixed = key in _ELEMENTWISE or (self._is_ours and not is_any)
        if shape not in (None, list(p.shape)) and self._is_known and fixed:
            raise ValueError(f"{where!r} has shape {shape}, expected {list(p.shape)}")
        if shape is None and entries and self._is_ours:
            raise ValueError(f"{where!r} holds tensors, expected one")
        if not p.is_complex():
            for entry in entries:
                if dtype_of(entry["dtype"]).is_complex:
                    raise ValueError(
                        f"{where!r} is {entry['dtype']}, and its parameter has no imaginary part"
                    )
        decode_at(repr(where), value, dict.fromkeys(tensors_in(value)))

    def _check_kind(self, body: Json) -> None:
        here = [kind.__name__ for kind in type(self._optimizer).__mro__]
        own = set(self._part.names.values())
        for stage in body["stages"]:
            kind = None if stage["optimizer"] is None else stage["optimizer"]["class"]
            if kind is not None and kind not in here and own & set(stage["parameters"]):
                raise ValueError(
                    f"the optimizer of stage {stage['stage']} was a {_shown(kind)}, expected a "
                    f"{here[0]}"
                )

    def put(self, state: Any) -> None:
        laid_out = {
            index: tree_map(partial(laid_out_as, p), entry)
            for index, (p, entry) in enumerate(zip(self._params(), state, strict=True))
            if entry
        }
        self._load({"state": laid_out, "param_groups": self._groups}, self._as_saved)

    def _load(self, given: Json, as_saved: Sequence[bool]) -> None:
        """Load a state_dict, and undo torch's casts to a parameter's narrower dtype."""
        self._optimizer.load_state_dict(given)
        if self._is_ours:
            return
        held = getattr(self._optimizer, "state", {})
        for index, (p, keeps) in enumerate(zip(self._params(), as_saved, strict=True)):
            entry = held.get(p)
            if keeps and isinstance(entry, dict):
                entry.update(_as_given(entry, given.get("state", {}).get(index)))

    def undo(self) -> Callable[[], object]:
        try:
            before = self._optimizer.state_dict()
        except RuntimeError:  # ZeRO's state is sharded over processes and cannot be undone
            return lambda: None
        every = [True] * len(self._params())
        return lambda: self._load(before, every)


def _as_given(loaded: Any, given: Any) -> Any:
    """Return the loaded state with tensors in the dtype that they were given in."""
    if isinstance(loaded, Tensor) and isinstance(given, Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(given, Mapping):
        return {key: _as_given(value, given.get(key)) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(given) is type(loaded):
        return type(loaded)(map(_as_given, loaded, given))
    return loaded


def _options(
    group: Mapping[str, Any], names: list[str], saved_options: Mapping[str, Json], where: str
) -> Json:
    """Return a group's saved options, which must be the same for all its parameters."""
    known = [(name, saved_options[name]) for name in names if name in saved_options]
    if not known:
        return {}
    first, options = known[0]
    for name, other in known[1:]:
        if other != options:
            differ = (k for k in {**options, **other} if options.get(k) != other.get(k))
            key = next(differ, next(iter(options.keys() ^ other.keys()), ""))
            raise ValueError(
                f"{where}: holds {first!r}, saved with {_shown(key)}={options.get(key)!r}, and "
                f"{name!r}, saved with {_shown(key)}={other.get(key)!r}; give them groups of their "
                "own"
            )
    taken = {}
    for key, value in options.items():
        if key in _IMPLEMENTATION:
            continue
        found = decode_at(f"{where}: {key!r}", value)
        if key in group or key in _RATES:
            now = group.get(key, group["lr"] if key in _RATES else None)
            if not alike(found, now):
                raise ValueError(
                    f"{where}: was saved with {_shown(key)}={found!r}, expected something like "
                    f"{now!r}"
                )
            taken[key] = _like(found, group.get(key))
        elif found:
            raise ValueError(
                f"{where}: was saved with {_shown(key)}={found!r}, which this optimizer does not "
                "know"
            )
    return taken


def _shown(name: str) -> str:
    """Return a name from a file, safe to show in an error."""
    return name if name.isidentifier() else repr(name)


def _like(value: Any, current: Any) -> Any:
    """Convert a number to a tensor, or back, to match the current value."""
    if isinstance(current, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(current, value)
    if isinstance(value, Tensor) and not isinstance(current, Tensor):
        return value.item()
    return value
