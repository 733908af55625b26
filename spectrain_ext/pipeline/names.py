"""Maps the names of a stage's tensors to those in the uncut model's state dict."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.cutting import cut_of
from spectrain_ext.errors import differing

#: The prefix that ``torch.compile`` gives all names of a module.
_COMPILED = "_orig_mod."


def bare(name: str) -> str:
    return name.removeprefix(_COMPILED)


def found_as(name: str, names: Container[str]) -> str:
    """Return a name as it appears among these, with or without the prefix; itself, if absent."""
    compiled = _COMPILED + name
    return compiled if name not in names and compiled in names else name


def full_names(stage: nn.Module, keys: Iterable[str], prefix: str) -> dict[str, str]:
    """Return the model's names for a stage's ``keys``; stages of ``partition`` know them."""
    cut = cut_of(stage)
    if cut.prefixes is None:
        return {key: prefix + key for key in keys}
    return {key: cut.full_name(bare(key)) for key in keys}


def model_names(stages: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the names in a pipeline's state dict, by the keys of its stages."""
    names: dict[str, str] = {}
    homes: dict[str, str] = {}  # the same, by the names that ties use
    tensors: dict[str, Any] = {}
    known = all(cut_of(stage).prefixes is not None for stage in stages.values())
    for k, stage in stages.items():
        state = stage.state_dict(keep_vars=True)
        cut = cut_of(stage)
        for key, full in full_names(stage, state, f"{k}.").items():
            names[f"{k}.{key}"] = homes[f"{k}.{bare(key)}"] = full
            home, name = cut.ties.get(bare(key), (k, key))
            copied = home != k and homes.get(f"{home}.{name}") == full
            copied = copied or (bare(key) in cut.copied_buffers and full in tensors)
            known = known and (copied or tensors.setdefault(full, state[key]) is state[key])
    # Fall back to nn.Sequential's names if a stage does not know its own, or names collide.
    return names if known else {key: key for key in names}


def use_model_names(pipe: nn.Module, whole: bool, copies: Iterable[Any]) -> None:
    """Make a pipeline, with all stages or not, save and load its state under the model's names."""
    ends: list[Callable[[list[str]], None]] = []

    def save(pipe: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        names = model_names(dict(pipe.named_children()))
        values = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
        for key, value in values.items():
            name = key[len(prefix) :]
            state[prefix + names.get(name, name)] = value

    def begin_load(
        pipe: nn.Module,
        state: dict[str, Any],
        prefix: str,
        _: object,
        strict: bool,
        missing: object,
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        stages = dict(pipe.named_children())
        names = {prefix + key: prefix + name for key, name in model_names(stages).items()}
        keys: dict[str, list[str]] = {}
        for key, name in names.items():
            keys.setdefault(name, []).append(key)
        values = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
        for p, alike in _names_by_parameter(stages, copies, names, prefix).items():
            _check_alike(p, alike, values)
        for name, value in values.items():
            state.update(dict.fromkeys(keys.get(name, ()), value))
            if name not in keys and whole:  # if not whole, another process may have it
                unexpected.append(name)
        before = len(errors)

        def end(missing: list[str]) -> None:
            missing[:] = dict.fromkeys(names.get(key, key) for key in missing)
            for n, message in enumerate(errors[before:], before):
                for key, name in names.items():
                    message = message.replace(f"for {key}:", f"for {name}:")
                    message = message.replace(f'"{key}"', f'"{name}"')
                errors[n] = message

        ends[:] = [end]

    def end_load(_: nn.Module, incompatible: Any) -> None:
        ends.pop()(incompatible.missing_keys)

    pipe.register_state_dict_post_hook(save)
    pipe.register_load_state_dict_pre_hook(begin_load)
    pipe.register_load_state_dict_post_hook(end_load)


def _names_by_parameter(
    stages: Mapping[str, nn.Module],
    copies: Iterable[Any],
    model_names: Mapping[str, str],
    prefix: str,
) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for k, stage in stages.items():
        for key, p in stage.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(model_names[f"{prefix}{k}.{key}"])
    for copy in copies:
        if copy.original is None:  # in another process
            names[copy.held] = [prefix + n for n in copy.names_elsewhere] + names[copy.held]
        elif copy.held is not copy.original:
            names[copy.held] = names[copy.original] + names[copy.held]
    return names


def _check_alike(p: nn.Parameter, names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Raise ValueError if a state has different values for the names of one parameter."""
    values = {name: state[name] for name in names if isinstance(state.get(name), Tensor)}
    first = next(iter(values), "")
    for name, value in values.items():
        if value.shape == values[first].shape:  # else torch says what does not fit
            one, other = (each.to(value.device, p.dtype) for each in (values[first], value))
            if not torch.equal(one, other):
                raise ValueError(f"load_state_dict: {differing(first, name)}")
