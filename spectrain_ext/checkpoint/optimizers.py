"""Optimizer state under the model's parameter names, whatever the groups and the cuts were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.optim import PredictingOptimizer
from spectrain_ext.optim.state import laid_out_as

from .documents import Json, decode, dtype_of, encode
from .parts import Part
from .progress import alike

# How a step is computed, not what: these stay what the loading side chose.
_IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))
_NOT_OPTIONS = frozenset(("params", "param_names"))
_RATES = ("initial_lr", "gap_rate")  # what a scheduler and a correction add to groups
# State of torch's optimizers and ours that has the parameter's shape; a scalar would be broadcast.
_ELEMENTWISE = frozenset(
    (
        *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum"),
        *("square_avg", "grad_avg", "acc_delta", "ax", "prev", "step_size", "gap_average"),
    )
)


class OptimizerState:
    """The optimizer of one stage."""

    def __init__(self, part: Part, optimizer: torch.optim.Optimizer) -> None:
        self.what = f"the optimizer of stage {part.stage}"
        self._part = part
        self._optimizer = optimizer
        self._names = part.parameter_names()

    def saved(self) -> tuple[dict[str, Tensor], Json]:
        """Return the tensors of its state, and the rest with the groups.

        Tensors may be inside lists, tuples and dicts.

        Raises:
            TypeError: state that is neither tensors nor what JSON can hold, or of no parameter, or
                a ``state_dict`` that is not like that of torch's optimizers.
        """
        where = self.what.removeprefix("the ")
        state = self._state_dict(where)
        tensors: dict[str, Tensor] = {}
        scalars: Json = {}
        groups = []
        for g, group in enumerate(self._optimizer.param_groups):
            names = [self._names[p] for p in group["params"]]
            for name, index in zip(names, state["param_groups"][g]["params"], strict=True):
                entry = state["state"].get(index, {})
                for key, value in _entry(entry, f"{where}: {name}").items():
                    if isinstance(value, Tensor):
                        tensors[_state_key(name, key)] = value
                        continue
                    if value is None and key in _ELEMENTWISE and self._is_known:
                        continue  # SGD without momentum
                    keep = _keeper(name, key, tensors)
                    found = encode(value, f"{where}: {name}.{key}", name_of=keep)
                    scalars.setdefault(name, {})[key] = found
            options = {
                key: encode(value, f"{where}: group {g}: {key}")
                for key, value in group.items()
                if key not in _NOT_OPTIONS
            }
            groups.append({"params": names, "options": options})
        kind = type(self._optimizer).__name__
        return tensors, {"optimizer": {"class": kind, "groups": groups, "scalars": scalars}}

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

    def match(self, body: Json) -> list[str]:
        """Find what belongs to its parameters.

        Raises:
            ValueError: groups that were saved with different options and are one here, an option
                that this optimizer does not know, or state of another shape than its parameter.
        """
        self._check_kind(body)
        all_saved = [s["optimizer"] for s in body["stages"] if s["optimizer"] is not None]
        options = {
            name: group["options"]
            for optimizer in all_saved
            for group in optimizer["groups"]
            for name in group["params"]
        }
        scalars = {n: found for optimizer in all_saved for n, found in optimizer["scalars"].items()}
        if not options.keys() & set(self._names.values()):
            raise ValueError(
                f"has no optimizer for stage {self._part.stage}; only_model=True loads without"
            )
        entries = _state_entries(body)
        known = body["tensors"]
        # per parameter whether it, and what is updated in its place, is what it was,
        self._as_saved: list[bool] = []
        # its name, what its tensors are called, and the rest
        self._state: list[tuple[str, list[str], Json]] = []
        self._groups: list[dict[str, Any]] = []
        for number, group in enumerate(self._optimizer.param_groups):
            mine = [self._names[p] for p in group["params"]]
            where = f"group {number} of {self.what}"
            merged = {**group, **_options(group, mine, options, where)}
            merged["params"] = list(range(len(self._state), len(self._state) + len(mine)))
            self._groups.append(merged)
            for p, name in zip(group["params"], mine, strict=True):
                state, rest = entries.get(name, {}), scalars.get(name, {})
                inside = _inside(name, rest, state)
                for key, entry in state.items():
                    self._check_entry(name, key, entry, p, key in inside)
                for key in rest.keys() & _ELEMENTWISE if self._is_known else ():
                    raise ValueError(
                        f"{_state_key(name, key)!r} is no tensor, expected one of shape "
                        f"{list(p.shape)}"
                    )
                self._state.append((name, list(state), rest))
                its_own = known.get(f"model.{name}", {"dtype": None})["dtype"]
                self._as_saved.append(
                    its_own == str(p.dtype).removeprefix("torch.")
                    and (f"master.{name}" in known) == (p in self._part.masters)
                )
        return [_state_key(name, key) for name, keys, _ in self._state for key in keys]

    @property
    def _is_known(self) -> bool:
        """Whether it is torch's or one of the package's; what others keep nobody knows."""
        torchs = type(self._optimizer).__module__.startswith("torch.optim")
        return torchs or isinstance(self._optimizer, PredictingOptimizer)

    def _check_entry(self, name: str, key: str, entry: Json, p: Tensor, inside: bool) -> None:
        shape = entry["shape"]
        ours = isinstance(self._optimizer, PredictingOptimizer)
        fits = shape == list(p.shape) or not self._is_known
        if not fits and key not in _ELEMENTWISE:  # torch's Adafactor keeps rows and columns
            fits = not ours or shape in ([], [1])
        if not fits or (inside and ours):
            raise ValueError(
                f"{_state_key(name, key)!r} has shape {shape}, expected {list(p.shape)}"
            )
        if dtype_of(entry["dtype"]).is_complex and not p.is_complex():
            raise ValueError(
                f"{_state_key(name, key)!r} is {entry['dtype']}, and its parameter has no "
                "imaginary part"
            )

    def _check_kind(self, body: Json) -> None:
        here = [kind.__name__ for kind in type(self._optimizer).__mro__]
        own = set(self._part.names.values())
        for stage in body["stages"]:
            kind = None if stage["optimizer"] is None else stage["optimizer"].get("class")
            if kind is not None and kind not in here and own & set(stage["parameters"]):
                raise ValueError(
                    f"the optimizer of stage {stage['stage']} was a {_shown(kind)}, expected a "
                    f"{here[0]}"
                )

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        state: dict[int, dict[str, Any]] = {}
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, (p, (name, keys, scalars)) in enumerate(zip(params, self._state, strict=True)):
            entry: dict[str, Any] = {
                key: laid_out_as(p, tensors[_state_key(name, key)]) for key in keys
            }
            for key, value in scalars.items():
                entry[key] = decode(value, tensor_of=entry.pop)
            if entry:
                state[index] = entry
        self._load({"state": state, "param_groups": self._groups}, self._as_saved)

    def _load(self, given: Json, as_saved: Sequence[bool]) -> None:
        """Load a state_dict; torch casts to a parameter's dtype, which may be too narrow."""
        self._optimizer.load_state_dict(given)
        if isinstance(self._optimizer, PredictingOptimizer):
            return
        held = getattr(self._optimizer, "state", {})
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, (p, keeps) in enumerate(zip(params, as_saved, strict=True)):
            entry = held.get(p)
            if keeps and isinstance(entry, dict):
                entry.update(_as_given(entry, given.get("state", {}).get(index)))

    def undo(self) -> Callable[[], object]:
        try:
            before = self._optimizer.state_dict()
        except RuntimeError:  # ZeRO's, of which each process has a part: that cannot be undone
            return lambda: None
        every = [True for group in self._optimizer.param_groups for _ in group["params"]]
        return lambda: self._load(before, every)


def _as_given(loaded: Any, given: Any) -> Any:
    """State as it was loaded, but for tensors of another dtype than was given."""
    if isinstance(loaded, Tensor) and isinstance(given, Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(given, Mapping):
        return {key: _as_given(value, given.get(key)) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(given) is type(loaded):
        return type(loaded)(map(_as_given, loaded, given))
    return loaded


def _keeper(name: str, key: str, tensors: dict[str, Tensor]) -> Callable[[Tensor], str]:
    """What takes the tensors inside an entry of a parameter's state, and numbers them."""
    numbers = count()

    def keep(tensor: Tensor) -> str:
        numbered = f"{key}[{next(numbers)}]"
        tensors[_state_key(name, numbered)] = tensor
        return numbered

    return keep


def _inside(name: str, scalars: Json, state: Json) -> set[str]:
    """What the tensors inside entries of a parameter's state are called.

    Raises:
        ValueError: one that is not there, or is in two places.
    """
    named: list[str] = []
    for value in scalars.values():
        decode(value, tensor_of=named.append)
    found = set(named)
    for key in named:
        if key not in state or len(found) != len(named):
            raise ValueError(f"has not one {_state_key(name, key)!r} for each of its places")
    return found


def _entry(entry: Any, where: str) -> Mapping[str, Any]:
    """A parameter's state, if it is one by names; TypeError."""
    if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
        raise TypeError(f"{where}: its state is not a dict with names as keys; it cannot be saved")
    return entry


def _state_key(name: str, key: str) -> str:
    """What a checkpoint calls a parameter's state; a key's own dots are not those between names."""
    return f"optimizer.state.{name}.{key.replace('%', '%25').replace('.', '%2E')}"


def _state_entries(body: Json) -> dict[str, dict[str, Json]]:
    """The entries of the tensors of each parameter's state."""
    found: dict[str, dict[str, Json]] = {}
    for name, entry in body["tensors"].items():
        if name.startswith("optimizer.state."):
            parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
            key = key.replace("%2E", ".").replace("%25", "%")
            found.setdefault(parameter, {})[key] = entry
    return found


def _options(
    group: Mapping[str, Any], names: list[str], saved_options: Mapping[str, Json], where: str
) -> dict[str, Any]:
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
        decoded = decode(value)
        if key in group or key in _RATES:
            now = group.get(key, group["lr"] if key in _RATES else None)
            if not alike(decoded, now):
                raise ValueError(
                    f"{where}: was saved with {_shown(key)}={decoded!r}, expected something like "
                    f"{now!r}"
                )
            taken[key] = _like(decoded, group.get(key))
        elif decoded:
            raise ValueError(
                f"{where}: was saved with {_shown(key)}={decoded!r}, which this optimizer does not "
                "know"
            )
    return taken


def _shown(name: str) -> str:
    """A name for an error, that a file may have made up."""
    return name if name.isidentifier() else repr(name)


def _like(value: Any, current: Any) -> Any:
    """Keep a number that is a tensor here a tensor, and the other way round."""
    if isinstance(current, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(current, value)
    if isinstance(value, Tensor) and not isinstance(current, Tensor):
        return value.item()
    return value
