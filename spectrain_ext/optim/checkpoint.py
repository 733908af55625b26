"""Checkpoint: saved state made independent, and loaded state put where it belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .buffers import converted, loaded_dtype
from .ledger import Group, State, read_entry
from .rule import Rule


def independent(rule: Rule[Any], entry: Any) -> Any:
    """Return a parameter's state with clones of its tensors."""
    return _cloned(entry, (*rule.buffers, *rule.scalars))


def independent_scalars(rule: Rule[Any], entry: Any) -> Any:
    """Return a parameter's state with clones of its scalar tensors only."""
    return _cloned(entry, tuple(rule.scalars))


def _cloned(entry: Any, keys: Sequence[str]) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {
        key: value.detach().clone() if key in keys and isinstance(value, Tensor) else value
        for key, value in entry.items()
    }


class StateLoader:
    """Keeps what is loaded from torch, which would cast it to its parameter's dtype.

    ``take`` removes a rule's state from a state_dict before torch sees it (hooks of the caller's
    run first), ``put`` puts it back into what torch makes of the rest.
    """

    def __init__(
        self,
        rule: Rule[Any],
        state_dtype: torch.dtype | None,
        groups: Sequence[Group],
        defaults: Mapping[str, Any],
    ) -> None:
        self._rule = rule
        self._state_dtype = state_dtype
        self._groups = groups
        self._defaults = defaults
        self._loaded: dict[Tensor, dict[str, Tensor]] = {}

    def take(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state_dict without the rule's state; ValueError or TypeError if it is bad."""
        rule = self._rule
        state = dict(state_dict["state"])
        for where, p, key in self._matched(state_dict["param_groups"]):
            entry = state.get(key)
            if not isinstance(entry, Mapping):
                continue
            saved = read_entry(where, rule, p, entry)
            if saved is None:
                if rule.scalars and entry:
                    raise ValueError(f"{where}: the state has no {next(iter(rule.scalars))}")
                continue
            dtype = loaded_dtype(p.dtype, saved.buffers[0].dtype, self._state_dtype)
            loaded = {
                name: converted(p, buffer, dtype)
                for name, buffer in zip(rule.buffers, saved.buffers, strict=True)
            }
            for name, value in zip(rule.scalars, saved.scalars, strict=True):
                loaded[name] = torch.tensor(value, dtype=torch.float64, device="cpu")
            self._loaded[p] = loaded
            # Scalars stay until `put`: torch wants a step in any state that is not empty.
            state[key] = {k: v for k, v in entry.items() if k not in rule.buffers}
        return {**state_dict, "state": state}

    def put(self, state: State) -> None:
        """Put what was taken into the state that the optimizer is about to have."""
        for p, loaded in self._loaded.items():
            state[p].update(loaded)

    def _matched(self, saved_groups: list[dict[str, Any]]) -> list[tuple[str, Tensor, Any]]:
        """Pair saved keys with parameters, checking the saved numbers; [] if torch will refuse."""
        if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in self._groups]:
            return []
        for index, saved in enumerate(saved_groups):
            self._rule.read(index, {**self._defaults, **saved})
        return [
            (f"parameter {i} of group {index}", p, key)
            for index, (group, saved) in enumerate(zip(self._groups, saved_groups, strict=True))
            for i, (p, key) in enumerate(zip(group["params"], saved["params"], strict=True))
        ]
