"""Names: what the uncut model calls the tensors of a pipeline's stages, in its state dict."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

#: What ``torch.compile`` puts before all names of a module.
_COMPILED = "_orig_mod."


def bare(name: str) -> str:
    """What a module calls something that it calls so where it has been compiled."""
    return name.removeprefix(_COMPILED)


def found_as(name: str, names: Container[str]) -> str:
    """Which of these names a module's is, be the module compiled; itself, if none."""
    compiled = _COMPILED + name
    return compiled if name not in names and compiled in names else name


def full_names(stage: nn.Module, keys: Iterable[str], prefix: str) -> dict[str, str]:
    """What the model calls what a stage calls ``keys``.

    Stages of ``partition`` know that, by their ``full_name``; before the keys of any other comes
    the prefix.
    """
    full_name = getattr(stage, "full_name", None)
    return {key: full_name(bare(key)) if callable(full_name) else prefix + key for key in keys}


def model_names(stages: Mapping[str, nn.Module]) -> dict[str, str]:
    """The keys of a pipeline's state dict, from those of a module of these stages.

    They are the model's if every stage knows them, and no two have different tensors under one;
    else those of ``nn.Sequential(*stages)``.
    """
    found: dict[str, str] = {}
    homes: dict[str, str] = {}  # the same, as ties call them
    held: dict[str, Any] = {}
    known = all(callable(getattr(stage, "full_name", None)) for stage in stages.values())
    for k, stage in stages.items():
        state = stage.state_dict(keep_vars=True)
        tied = getattr(stage, "tied_parameters", {})  # see mark_ties: copies of an earlier stage's
        for key, full in full_names(stage, state, f"{k}.").items():
            found[f"{k}.{key}"] = homes[f"{k}.{bare(key)}"] = full
            home, name = tied.get(bare(key), (k, key))
            copied = home != k and homes.get(f"{home}.{name}") == full
            known = known and (copied or held.setdefault(full, state[key]) is state[key])
    return found if known else {key: key for key in found}


def give_names(stages: Mapping[str, nn.Module], state: dict[str, Any], prefix: str) -> None:
    """Rename what a module of these stages has put into a state dict."""
    names = model_names(stages)
    own = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
    for key, value in own.items():
        name = key[len(prefix) :]
        state[prefix + names.get(name, name)] = value


def begin_load(
    stages: Mapping[str, nn.Module],
    state: dict[str, Tensor],
    prefix: str,
    unexpected: list[str] | None,
    errors: list[str],
) -> Callable[[list[str]], None]:
    """Rename what a state dict has for a module of these stages, which is about to be loaded.

    ``unexpected`` gets the names that no stage has; None: other processes may have them. What is
    returned is called with the missing keys at the end of the load, and gives these and the
    messages that came to ``errors`` the model's names.
    """
    names = {prefix + key: prefix + name for key, name in model_names(stages).items()}
    places: dict[str, list[str]] = {}
    for key, name in names.items():
        places.setdefault(name, []).append(key)
    given = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
    for name, value in given.items():
        state.update(dict.fromkeys(places.get(name, ()), value))
        if name not in places and unexpected is not None:
            unexpected.append(name)
    before = len(errors)

    def end(missing: list[str]) -> None:
        missing[:] = dict.fromkeys(names.get(key, key) for key in missing)
        for n, message in enumerate(errors[before:], before):
            for key, name in names.items():
                message = message.replace(f"for {key}:", f"for {name}:")
                message = message.replace(f'"{key}"', f'"{name}"')
            errors[n] = message

    return end
