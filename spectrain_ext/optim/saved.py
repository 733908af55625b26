"""Loads the state of a state_dict, which torch would cast to the parameters' dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .state import Rule, converted, loaded_dtype, read_entry, ruled, warn_of_conversion


def without_state(rule: Rule, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict without the state that torch would cast to the parameter's dtype."""

    def others_of(entry: Any) -> Any:
        if not isinstance(entry, Mapping):
            return entry
        return {name: v for name, v in entry.items() if v is None or name not in rule.all_keys}

    state = {key: others_of(entry) for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


def put_saved(
    rule: Rule,
    state_dtype: torch.dtype | None,
    defaults: Mapping[str, Any],
    saved: Mapping[str, Any],
    loaded: Mapping[str, Any],
) -> None:
    """Add the saved state to the state_dict that torch is about to load; or raise."""
    keys: list[tuple[Any, Any]] = []
    for index, group in enumerate(saved["param_groups"]):
        numbers = rule.read(index, {**defaults, **group})
        keys += [(key, numbers) for key in group["params"]]
    known = rule.all_keys
    parameters = ruled(rule, loaded["param_groups"])
    for (where, p, rule), (key, numbers) in zip(parameters, keys, strict=True):
        entry = saved["state"].get(key)
        if not isinstance(entry, Mapping):
            continue
        state = loaded["state"][p]
        for name, value in entry.items():  # such as what a hook of the step keeps there
            if name not in known and isinstance(value, Tensor):
                state[name] = value.detach().to(p.device, copy=True)
        read = read_entry(where, rule, p, entry)
        if read is None:
            if rule.scalars and entry:
                raise ValueError(f"{where}: the state has no {next(iter(rule.scalars))}")
            continue
        buffers, scalars = read
        dtype = loaded_dtype(p.dtype, buffers[0].dtype, state_dtype)
        warn_of_conversion(buffers[0].dtype, dtype)
        state.update(zip(rule.buffers, (converted(p, b, dtype) for b in buffers), strict=True))
        for name, number in zip(rule.scalars, scalars, strict=True):
            state[name] = torch.tensor(number, dtype=torch.float64, device="cpu")
        for name, shape in numbers.loose(p.shape).items() if rule.loose else ():
            value = entry.get(name)
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if not isinstance(value, Tensor) or got != shape:
                raise ValueError(f"{where}: {name} must be a tensor of shape {shape}, got {got}")
            # Contiguous, so that matrix products have the same bits for any saved strides.
            state[name] = torch.empty(shape, dtype=loose_dtype(p), device=p.device).copy_(value)


def loose_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of state that kernels do not use."""
    return torch.promote_types(weight.dtype, torch.float32)
