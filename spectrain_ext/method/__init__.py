"""Defines methods: which weights, predicted how far, each forward and backward of a stage uses."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .formulas import delay, delay_under, recipe_clip
from .registry import (
    MethodName,
    find_method,
    hybrid,
    interleaved,
    methods,
    pipemare,
    second_order,
    spectrain,
)
from .stages import (
    check_optimizer,
    microbatches_of,
    phases_on,
    places_of,
    rules_at,
)
from .value import Method, Phase, Window, factor_of, phases_of

if TYPE_CHECKING:
    from .preview import check, in_words
    from .refusals import check_replicas, numbers_of

__all__ = [
    "Method",
    "MethodName",
    "Phase",
    "Window",
    "check",
    "check_optimizer",
    "check_replicas",
    "delay",
    "delay_under",
    "factor_of",
    "find_method",
    "hybrid",
    "in_words",
    "interleaved",
    "methods",
    "microbatches_of",
    "numbers_of",
    "phases_of",
    "phases_on",
    "pipemare",
    "places_of",
    "recipe_clip",
    "rules_at",
    "second_order",
    "spectrain",
]

_ON_FIRST_USE = {
    **dict.fromkeys(("check", "in_words"), "preview"),
    **dict.fromkeys(("check_replicas", "numbers_of"), "refusals"),
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
