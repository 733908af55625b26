"""Saves optimizer state by parameter names, independent of groups and cuts."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spectrain_ext.optim import PredictingOptimizer
from spectrain_ext.optim.state import laid_out_as

from .documents import Json, Keep, decode, encode, tensors_in
from .parts import Item, Part
from .weights import part_like, weights_of

# These select an implementation with the same results: the loading side's choice is kept.
_IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))
_NOT_OPTIONS = frozenset(("params", "param_names"))
_NOTHING: Json = {"options": {}}
_INITIAL = "initial_lr"  # an option that a scheduler adds to groups
# State of known optimizers that must have the parameter's shape; a scalar would be broadcast.
_ELEMENTWISE = frozenset(
    (
        *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum"),
        *("square_avg", "grad_avg", "acc_delta", "ax", "prev", "step_size", "update_buffer"),
    )
)


class OptimizerState(Item):
    """The optimizer of one stage; its state is saved and loaded per parameter."""

    key = "optimizer.state."

    def __init__(self, part: Part, optimizer: torch.optim.Optimizer) -> None:
        self.what = f"the optimizer of stage {part.stage}"
        self._part = part
        self._optimizer = optimizer
        self._names, self._owners = part.parameter_names(), part.parameters()
        self._is_ours = isinstance(optimizer, PredictingOptimizer)
        self._loose = (
            optimizer.stepper.rule.loose if isinstance(optimizer, PredictingOptimizer) else ()
        )
        self._is_known = self._is_ours or type(optimizer).__module__.startswith("torch.optim")

    def _params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def saved(self, keep: Keep) -> Json:
        where = self.what.removeprefix("the ")
        given = self._state_dict(where)
        indices = (index for group in given["param_groups"] for index in group["params"])
        state: Json = {}
        shared = dict(given["state"])  # without what belongs to a parameter
        for p, index in zip(self._params(), indices, strict=True):
            name, entry = self._names[p], shared.pop(index, {})
            if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
                raise TypeError(
                    f"{where}: {name}: its state is not a dict with names as keys; it cannot be "
                    "saved"
                )
            found = {
                key: encode(
                    self._whole(value, p), f"{where}: {name}.{key}", keep, f"{self.key}{name}.{key}"
                )
                for key, value in entry.items()
                # SGD without momentum stores None
                if not (value is None and key in _ELEMENTWISE and self._is_known)
            }
            if found:
                state[name] = found
        more = {key: value for key, value in given.items() if key not in ("state", "param_groups")}
        more |= {"state": shared} if shared else {}
        at = f"optimizer.stage{self._part.stage}."
        groups = [
            {
                "params": [self._names[p] for p in group["params"]],
                **_encoded(group, f"{where}: group {g}: ", keep, f"{at}group{g}."),
            }
            for g, group in enumerate(self._optimizer.param_groups)
        ]
        found = {"class": type(self._optimizer).__name__, "groups": groups, "state": state}
        return found | ({"shared": _encoded(more, f"{where}: ", keep, at)} if more else {})

    def _whole(self, value: object, p: Tensor) -> object:
        """Return state of a shard's shape as that of the whole parameter."""
        if isinstance(value, Tensor) and value.shape == p.shape:
            return part_like(value, self._owners[p])
        return value

    def _state_dict(self, where: str) -> Json:
        optimizer = self._optimizer
        state = optimizer.state_dict()
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if groups is None or "state" not in state or len(groups) != len(optimizer.param_groups):
            raise TypeError(
                f"{where}: the state_dict() of a {type(optimizer).__name__} has not the form of "
                "torch.optim.Optimizer's, in which state belongs to parameters; it cannot be saved"
            )
        return dict(state)

    def match(self, body: Json) -> Json:
        self._check_kind(body)
        taken = self._part.taken
        made = [] if taken is None else [n for n in self._names.values() if n in taken.made]
        if made:
            raise ValueError(
                f"has no {made[0]!r}: its module computes it from other saved tensors, whose state "
                "in the optimizer it does not take; only_model=True loads without"
            )
        options: dict[str, Json] = {}
        shared: dict[str, Json] = {}
        states: dict[str, Json] = {}
        for optimizer in (s["optimizer"] for s in body["stages"] if s["optimizer"] is not None):
            states |= optimizer["state"]
            for group in optimizer["groups"]:
                options |= dict.fromkeys(group["params"], group)
                shared |= dict.fromkeys(group["params"], optimizer.get("shared", _NOTHING))
        if not options.keys() & set(self._names.values()):
            raise ValueError(
                f"has no optimizer for stage {self._part.stage}; only_model=True loads without"
            )
        groups = []
        for number, group in enumerate(self._optimizer.param_groups):
            mine = [self._names[p] for p in group["params"]]
            where = f"group {number} of {self.what}"
            remedy = "give them groups of their own, or load into the saved stages"
            found = _common(mine, options, body["tensors"], where, remedy)
            groups.append(_taken(found, group if self._is_known else None, where))
        params = self._params()
        mine = [self._names[p] for p in params]
        where = f"the state of {self.what}"
        remedy = "it belongs to stages, not to parameters: load into the saved stages"
        common = (
            _NOTHING if self._is_ours else _common(mine, shared, body["tensors"], where, remedy)
        )
        self._as_saved = self._kept_as_saved(body)
        entries = [states.get(name, {}) for name in mine]
        for p, name, entry in zip(params, mine, entries, strict=True):
            for key, value in entry.items():
                if isinstance(value, dict) and "$tensor" in value:
                    shape, owner = body["tensors"][value["$tensor"]]["shape"], self._owners[p]
                    self._check_shape(f"{self.key}{name}.{key}", key, shape, owner)
                    if shape == list(owner.shape):
                        self._part.cuts[value["$tensor"]] = owner
        return {"groups": groups, "shared": common, "state": entries}

    def _check_shape(self, where: str, key: str, shape: list[int], p: Tensor) -> None:
        """Raise ValueError for state of a known optimizer that does not fit its parameter."""
        # Others may have any shape: torch's Adafactor keeps rows and columns.
        ours = self._is_ours and key not in self._loose and shape not in ([], [1])
        if self._is_known and (key in _ELEMENTWISE or ours) and shape != list(p.shape):
            raise ValueError(f"{where!r} has shape {shape}, expected {list(p.shape)}")

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
        params = self._params()
        # Not what lists in it hold: a matrix of sums over gradients may have the parameter's shape.
        entries: dict[Any, Any] = {
            index: {key: laid_out_as(p, value) for key, value in entry.items()}
            for index, (p, entry) in enumerate(zip(params, state["state"], strict=True))
            if entry
        }
        groups, count = [], 0
        for group, saved in zip(self._optimizer.param_groups, state["groups"], strict=True):
            options, now = _on_device(saved, group["params"]), group
            if self._is_known:
                options = {key: _like(value, group.get(key)) for key, value in options.items()}
            elif options:  # without those that a step of this optimizer has added
                defaults = getattr(self._optimizer, "defaults", group)
                known = {*defaults, _INITIAL, *_IMPLEMENTATION, *_NOT_OPTIONS}
                now = {key: value for key, value in group.items() if key in known}
            indices = list(range(count, count + len(group["params"])))
            groups.append({**now, **options, "params": indices})
            count += len(indices)
        more = _on_device(state["shared"], params)
        entries |= more.get("state", {})
        self._load({**more, "state": entries, "param_groups": groups}, self._as_saved)

    def _load(self, given: Json, as_saved: Sequence[bool]) -> None:
        """Load a state_dict, and undo what torch does to deques, strings and dtypes."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Casting complex values to real")
            self._optimizer.load_state_dict(given)
        if self._is_ours:
            return
        held = getattr(self._optimizer, "state", {})
        for index, (p, keeps_dtypes) in enumerate(zip(self._params(), as_saved, strict=True)):
            # Of what is sharded over replicas, torch's ZeRO has None.
            entry: Json = held.get(p) or {}
            saved: Json = given.get("state", {}).get(index) or {}
            for key in entry.keys() & saved.keys():
                entry[key] = _as_given(entry[key], saved[key], keeps_dtypes)

    def undo(self) -> Callable[[], object]:
        try:
            before = self._optimizer.state_dict()
        except RuntimeError:  # ZeRO's state is sharded over processes and cannot be undone
            return lambda: None
        every = [True] * len(self._params())
        return lambda: self._load(before, every)


def _as_given(loaded: Any, given: Any, keeps_dtypes: bool) -> Any:
    """Return loaded tensors in the given containers, with their dtypes, and given strings."""
    # torch makes new deques without a length, and of strings those of generators.
    tensors = iter([leaf for leaf in tree_leaves(loaded) if isinstance(leaf, Tensor)])

    def leaf_of(given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        tensor = next(tensors)
        return given.to(tensor.device) if keeps_dtypes else tensor

    return _mapped(leaf_of, given)


def _encoded(values: Mapping[str, Any], where: str, keep: Keep, key: str) -> Json:
    """Encode values that several parameters share, and list those with tensors on a device."""

    def kept(name: str, tensor: Tensor) -> Json:
        is_number = tensor.numel() == 1 and not tensor.is_complex()
        found: Json = encode(tensor, where) if is_number else keep(name, tensor)
        return found

    options = {
        name: encode(value, where + name, kept, key + name)
        for name, value in values.items()
        if name not in _NOT_OPTIONS
    }
    on_device = [
        name
        for name in options
        if any(isinstance(leaf, Tensor) and not leaf.is_cpu for leaf in tree_leaves(values[name]))
    ]
    return {"options": options} | ({"on_device": on_device} if on_device else {})


def _common(
    names: list[str], saved: Mapping[str, Json], tensors: Json, where: str, remedy: str
) -> Json:
    """Return the values that were saved for parameters, which must be the same for all of them."""
    known = [(name, saved[name]) for name in names if name in saved]
    if not known:
        return _NOTHING
    first, common = known[0]
    for name, others in known[1:]:
        one, other = (_resolved(each["options"], tensors) for each in (common, others))
        if other != one:
            missing = object()
            key = next(k for k in {**one, **other} if one.get(k, missing) != other.get(k, missing))
            raise ValueError(
                f"{where}: holds {first!r}, saved with {_shown(key)}={reprlib.repr(one.get(key))}, "
                f"and {name!r}, saved with {_shown(key)}={reprlib.repr(other.get(key))}; {remedy}"
            )
    return common


def _resolved(encoded: Any, tensors: Json) -> Any:
    """Replace references to tensors by what identifies their content."""
    if isinstance(encoded, list):
        return [_resolved(member, tensors) for member in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "$tensor" in encoded:
        return {**tensors[encoded["$tensor"]], "file": ""}
    return {key: _resolved(value, tensors) for key, value in encoded.items()}


def _on_device(saved: Json, params: Sequence[Tensor]) -> Json:
    """Return decoded values, those that were on a device on that of the parameters."""

    def moved(leaf: Any) -> Any:
        return leaf.to(params[0].device) if isinstance(leaf, Tensor) and params else leaf

    names = saved.get("on_device", ())
    return {k: _mapped(moved, v) if k in names else v for k, v in saved["options"].items()}


def _mapped(of: Callable[[Any], Any], value: Any) -> Any:
    return tree_map(of, value, is_leaf=lambda leaf: isinstance(leaf, torch.Size))


def _taken(saved: Json, group: Mapping[str, Any] | None, where: str) -> Json:
    """Return the saved options that a group takes; all if None, as torch does."""
    taken = {}
    for key, value in saved["options"].items():
        if key in _IMPLEMENTATION:
            continue
        if group is None or key in group or key == _INITIAL:
            taken[key] = value
        elif decoded := decode(value, dict.fromkeys(tensors_in(value))):
            raise ValueError(
                f"{where}: was saved with {_shown(key)}={decoded!r}, which this optimizer does not "
                "know"
            )
    return {**saved, "options": taken}


def _shown(name: str) -> str:
    """Return a name from a file, safe to show in an error."""
    return name if name.isidentifier() else repr(name)


def _like(value: Any, current: Any) -> Any:
    """Convert a number to a tensor, or back, to match the current value."""
    if isinstance(current, Tensor):
        is_tensor = isinstance(value, Tensor)
        return value.to(current.device) if is_tensor else torch.full_like(current, value)
    return value.item() if isinstance(value, Tensor) else value
