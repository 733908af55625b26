"""Finds the function of ``--workload module:function`` and what a run depends on."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from spectrain_ext.cli.options import imported, is_imported, method_of

from .errors import OptionError

#: Options that a workload function receives if it has parameters of these names.
OFFERED = (
    *("data_dir", "batch_size", "width", "depth", "context", "train_samples", "test_samples"),
    *("augment", "optimizer", "momentum", "weight_decay", "nesterov", "lr_schedule", "warmup"),
)
ALWAYS = ("seed", "stages", "method", "epochs", "lr")


@lru_cache
def parameters_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the function ``module:function``."""
    function = function_of(name)
    found = inspect.signature(function).parameters
    for parameter in found.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        by_keyword = parameter.kind is not parameter.POSITIONAL_ONLY
        known = by_keyword and parameter.name in (*ALWAYS, *OFFERED)
        if not known and parameter.default is parameter.empty:
            raise OptionError(
                "workload",
                f"{name} has a parameter {parameter.name!r} without a default; it is called by "
                f"keyword, with those that it has of {', '.join((*ALWAYS, *OFFERED))}",
            )
    return found


def function_of(name: str) -> Callable[..., object]:
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


@lru_cache
def source_of_function(name: str) -> str:
    """Return the hash of the module's file; changes in modules that it imports are not detected."""
    function_of(name)
    return _hash_of(name)


def source_of(method: str) -> dict[str, str]:
    """Return the source hash of a method's module; empty for a registered method.

    Changes in modules that it imports are not detected.
    """
    if not is_imported(method):
        return {}
    method_of(method)
    return {"method": method, "method_sha256": _hash_of(method)}


def _hash_of(name: str) -> str:
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return hashlib.sha256(b"" if file is None else Path(file).read_bytes()).hexdigest()
