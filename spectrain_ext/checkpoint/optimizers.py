"""Optimizer state under the model's parameter names, whatever the groups and the cuts were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .documents import Json, decode, dtype_of, encode
from .parts import Part
from .progress import alike

# How a step is computed, not what: these stay what the loading side chose.
_IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))
_NOT_OPTIONS = frozenset(("params", "param_names"))
# State of torch's optimizers and ours that has the parameter's shape; a scalar would be broadcast.
_ELEMENTWISE = frozenset(
    (
        *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum"),
        *("square_avg", "grad_avg", "acc_delta", "ax", "prev", "step_size"),
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

        Raises:
            TypeError: state that is neither a tensor nor what JSON can hold.
        """
        where = self.what.removeprefix("the ")
        state = self._optimizer.state_dict()
        tensors: dict[str, Tensor] = {}
        scalars: Json = {}
        groups = []
        for g, group in enumerate(self._optimizer.param_groups):
            names = [self._names[p] for p in group["params"]]
            for name, index in zip(names, state["param_groups"][g]["params"], strict=True):
                for key, value in state["state"].get(index, {}).items():
                    if isinstance(value, Tensor):
                        tensors[_state_key(name, key)] = value
                    elif value is not None:
                        scalars.setdefault(name, {})[key] = encode(value, f"{where}: {name}.{key}")
            options = {
                key: encode(value, f"{where}: group {g}: {key}")
                for key, value in group.items()
                if key not in _NOT_OPTIONS
            }
            groups.append({"params": names, "options": options})
        kind = type(self._optimizer).__name__
        return tensors, {"optimizer": {"class": kind, "groups": groups, "scalars": scalars}}

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
        # what load_state_dict takes, with names in place of tensors
        self._tensors: dict[int, dict[str, str]] = {}
        self._scalars: dict[int, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        index = 0
        for number, group in enumerate(self._optimizer.param_groups):
            mine = [self._names[p] for p in group["params"]]
            where = f"group {number} of {self.what}"
            merged = {**group, **_options(group, mine, options, where)}
            merged["params"] = list(range(index, index + len(mine)))
            self._groups.append(merged)
            for p, name in zip(group["params"], mine, strict=True):
                state = entries.get(name, {})
                for key, entry in state.items():
                    _check_entry(name, key, entry, p)
                self._tensors[index] = {key: _state_key(name, key) for key in state}
                self._scalars[index] = {k: decode(v) for k, v in scalars.get(name, {}).items()}
                for key in self._scalars[index].keys() & _ELEMENTWISE:
                    raise ValueError(
                        f"{_state_key(name, key)!r} is no tensor, expected one of shape "
                        f"{list(p.shape)}"
                    )
                index += 1
        return [name for state in self._tensors.values() for name in state.values()]

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
        state = {
            index: self._scalars[index] | {key: tensors[name] for key, name in names.items()}
            for index, names in self._tensors.items()
            if names or self._scalars[index]
        }
        self._optimizer.load_state_dict({"state": state, "param_groups": self._groups})

    def undo(self) -> Callable[[], object]:
        before = self._optimizer.state_dict()
        return lambda: self._optimizer.load_state_dict(before)


def _state_key(name: str, key: str) -> str:
    """What a checkpoint calls a parameter's state."""
    return f"optimizer.state.{name}.{key}"


def _state_entries(body: Json) -> dict[str, dict[str, Json]]:
    """The entries of the tensors of each parameter's state."""
    found: dict[str, dict[str, Json]] = {}
    for name, entry in body["tensors"].items():
        if name.startswith("optimizer.state."):
            parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
            found.setdefault(parameter, {})[key] = entry
    return found


def _check_entry(name: str, key: str, entry: Json, p: Tensor) -> None:
    shapes = [list(p.shape)] + [[], [1]] * (key not in _ELEMENTWISE)
    if entry["shape"] not in shapes:
        raise ValueError(
            f"{_state_key(name, key)!r} has shape {entry['shape']}, expected {list(p.shape)}"
        )
    if dtype_of(entry["dtype"]).is_complex and not p.is_complex():
        raise ValueError(
            f"{_state_key(name, key)!r} is {entry['dtype']}, and its parameter has no imaginary "
            "part"
        )


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
        if key in group or key == "initial_lr":
            now = group.get(key, group["lr"] if key == "initial_lr" else None)
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
