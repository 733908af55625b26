"""Finds the function of ``--workload module:function`` and makes its workload."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from spectrain_ext.cli.options import imported, is_imported, method_of
from spectrain_ext.method import Method

from .models.building import seeded
from .options import OptionError
from .workload import Workload

if TYPE_CHECKING:
    from .settings import TrainSettings

#: Options that a workload function receives if it has parameters of these names.
OFFERED = (
    *("data_dir", "batch_size", "width", "depth", "context", "train_samples", "test_samples"),
    *("augment", "optimizer", "momentum", "weight_decay", "nesterov", "lr_schedule", "warmup"),
)
_ALWAYS = ("seed", "stages", "method", "epochs", "lr")


@lru_cache
def parameters_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the function ``module:function``, all of which options provide."""
    found = inspect.signature(_function_of(name)).parameters
    for parameter in found.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        by_keyword = parameter.kind is not parameter.POSITIONAL_ONLY
        known = by_keyword and parameter.name in (*_ALWAYS, *OFFERED)
        if not known and parameter.default is parameter.empty:
            raise OptionError(
                "workload",
                f"{name} has a parameter {parameter.name!r} without a default; it is called by "
                f"keyword, with those that it has of {', '.join((*_ALWAYS, *OFFERED))}",
            )
    return found


def _function_of(name: str) -> Callable[..., Any]:
    if ":" not in name:
        raise OptionError("workload", f"expected module:function, got {name!r}")
    try:
        function = imported(name)
    except ValueError as error:
        raise OptionError("workload", str(error)) from error
    if not callable(function):
        raise OptionError(
            "workload",
            f"{name!r} is of type {type(function).__name__}, expected a function that returns a "
            "studies.Workload",
        )
    return function  # type: ignore[no-any-return]


def start_rate(name: str) -> float | None:
    """Return the default of the function's ``lr``, None if it has none."""
    parameter = parameters_of(name).get("lr")
    default = None if parameter is None else parameter.default
    return float(default) if isinstance(default, (int, float)) else None


def own(settings: TrainSettings, method: Method, stages: int, seed: int) -> Workload:
    """Call the function of the settings' ``workload`` with the options it has parameters for.

    It runs with torch's random state seeded by ``seed``; the previous state is restored afterwards.
    """
    name = settings.workload
    assert name is not None
    offered = {
        **{"seed": seed, "stages": stages, "method": method.name},
        **{"epochs": settings.epochs, "lr": settings.lr},
        **dict(settings.given),
    }
    known = parameters_of(name)
    with seeded(seed):
        made = _function_of(name)(**{key: offered[key] for key in known if key in offered})
    if not isinstance(made, Workload):
        raise OptionError(
            "workload", f"{name} returned a {type(made).__name__}, expected a studies.Workload"
        )
    if not isinstance(made.model, (Sequence, nn.Sequential, nn.ModuleList)):
        raise OptionError(
            "workload",
            f"{name} returned a model of type {type(made.model).__name__}, expected an "
            "nn.Sequential or a list of layers, to be cut between them",
        )
    return replace(made, about={**made.about, **source_of_workload(name)})


# The hash of a module's file; changes in modules that it imports are not detected.


@lru_cache
def source_of_workload(name: str) -> dict[str, str]:
    _function_of(name)
    return {"workload_sha256": _hash_of(name)}


def source_of_method(name: str) -> dict[str, str]:
    """Return the source hash of a method's module; empty for a registered method."""
    if not is_imported(name):
        return {}
    method_of(name)
    return {"method": name, "method_sha256": _hash_of(name)}


def _hash_of(name: str) -> str:
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return hashlib.sha256(b"" if file is None else Path(file).read_bytes()).hexdigest()
