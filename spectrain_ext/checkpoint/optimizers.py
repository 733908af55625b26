"""Optimizer state under the model's parameter names, whatever the groups and the cuts were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.errors import CheckpointError

from .documents import Json, decode, dtype_of, encode
from .parts import Part

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


def state_key(name: str, key: str) -> str:
    """Return what a checkpoint calls a parameter's state."""
    return f"optimizer.state.{name}.{key}"


def saved(part: Part) -> tuple[dict[str, Tensor], Json | None]:
    """Return a part's optimizer state: its tensors, and the rest as JSON.

    Raises:
        TypeError: state that is neither a tensor nor what JSON can hold.
    """
    if part.optimizer is None:
        return {}, None
    names = part.parameter_names()
    where = f"optimizer of stage {part.stage}"
    state = part.optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: Json = {}
    for name, entry in _by_name(part.optimizer.param_groups, state, names).items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[state_key(name, key)] = value
            elif value is not None:
                scalars.setdefault(name, {})[key] = encode(value, f"{where}: {name}.{key}")
    groups = [
        {
            "params": [names[p] for p in group["params"]],
            "options": {
                key: encode(value, f"{where}: group {index}: {key}")
                for key, value in group.items()
                if key not in _NOT_OPTIONS
            },
        }
        for index, group in enumerate(part.optimizer.param_groups)
    ]
    kind = type(part.optimizer).__name__
    return tensors, {"class": kind, "groups": groups, "scalars": scalars}


def _by_name(groups: Any, state: Any, names: Mapping[Tensor, str]) -> dict[str, dict[str, Any]]:
    found = {}
    for group, indexed in zip(groups, state["param_groups"], strict=True):
        for p, index in zip(group["params"], indexed["params"], strict=True):
            if index in state["state"]:
                found[names[p]] = state["state"][index]
    return found


@dataclass(frozen=True)
class Wanted:
    """What a part's optimizer takes from a checkpoint.

    Attributes:
        tensors: per parameter index, key -> name of the tensor in the checkpoint.
        scalars: per parameter index, the state that is no tensor.
        groups: ``param_groups`` for ``load_state_dict``.
    """

    tensors: dict[int, dict[str, str]]
    scalars: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]

    def state_dict(self, loaded: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what ``load_state_dict`` takes."""
        state: dict[int, dict[str, Any]] = {k: dict(v) for k, v in self.scalars.items()}
        for index, keys in self.tensors.items():
            entry = state.setdefault(index, {})
            entry.update({key: loaded[name] for key, name in keys.items()})
        return {"state": state, "param_groups": self.groups}


def wanted(part: Part, body: Json, path: object) -> Wanted:
    """Find what belongs to a part's optimizer.

    Raises:
        CheckpointError: groups that were saved with different options and are one here, an option
            that this optimizer does not know, or state of another shape than its parameter.
    """
    assert part.optimizer is not None
    names = part.parameter_names()
    by_parameter = _states(body)
    _check_kind(part, body, path)
    all_saved = [stage["optimizer"] for stage in body["stages"] if stage["optimizer"] is not None]
    options = {
        name: group["options"]
        for optimizer in all_saved
        for group in optimizer["groups"]
        for name in group["params"]
    }
    scalars = {n: values for optimizer in all_saved for n, values in optimizer["scalars"].items()}
    if not options.keys() & set(names.values()):
        raise CheckpointError(
            f"{path}: has no optimizer for stage {part.stage}; only_model=True loads without"
        )
    found = Wanted({}, {}, [])
    index = 0
    for number, group in enumerate(part.optimizer.param_groups):
        mine = [names[p] for p in group["params"]]
        where = f"{path}: group {number} of the optimizer of stage {part.stage}"
        merged = {**group, **_options(group, mine, options, where)}
        merged["params"] = list(range(index, index + len(mine)))
        found.groups.append(merged)
        for p, name in zip(group["params"], mine, strict=True):
            for key, entry in by_parameter.get(name, {}).items():
                shapes = [list(p.shape)] + [[], [1]] * (key not in _ELEMENTWISE)
                if entry["shape"] not in shapes:
                    raise CheckpointError(
                        f"{path}: {state_key(name, key)!r} has shape {entry['shape']}, expected "
                        f"{list(p.shape)}"
                    )
                if dtype_of(entry["dtype"]).is_complex and not p.is_complex():
                    raise CheckpointError(
                        f"{path}: {state_key(name, key)!r} is {entry['dtype']}, and its parameter "
                        "has no imaginary part"
                    )
                found.tensors.setdefault(index, {})[key] = state_key(name, key)
            if name in scalars:
                found.scalars[index] = {k: decode(v) for k, v in scalars[name].items()}
                for key in found.scalars[index].keys() & _ELEMENTWISE:
                    raise CheckpointError(
                        f"{path}: {state_key(name, key)!r} is no tensor, expected one of shape "
                        f"{list(p.shape)}"
                    )
            index += 1
    return found


def _check_kind(part: Part, body: Json, path: object) -> None:
    here = [kind.__name__ for kind in type(part.optimizer).__mro__]
    own = set(part.names.values())
    for stage in body["stages"]:
        kind = None if stage["optimizer"] is None else stage["optimizer"].get("class")
        if kind is not None and kind not in here and own & set(stage["parameters"]):
            raise CheckpointError(
                f"{path}: the optimizer of stage {stage['stage']} was a {_shown(kind)}, expected a "
                f"{here[0]}"
            )


def _states(body: Json) -> dict[str, dict[str, Json]]:
    found: dict[str, dict[str, Json]] = {}
    for name, entry in body["tensors"].items():
        if name.startswith("optimizer.state."):
            parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
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
            raise CheckpointError(
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
                raise CheckpointError(
                    f"{where}: was saved with {_shown(key)}={decoded!r}, expected something like "
                    f"{now!r}"
                )
            taken[key] = _like(decoded, group.get(key))
        elif decoded:
            raise CheckpointError(
                f"{where}: was saved with {_shown(key)}={decoded!r}, which this optimizer does not "
                "know"
            )
    return taken


def alike(value: Any, current: Any) -> bool:
    """Whether both are numbers, or texts, or sequences or mappings; None is like anything."""
    if value is None or current is None:
        return True
    for kinds in ((bool, int, float, Tensor), (str,), (list, tuple), (Mapping,)):
        if isinstance(value, kinds) or isinstance(current, kinds):
            return isinstance(value, kinds) and isinstance(current, kinds)
    return type(value) is type(current)


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
