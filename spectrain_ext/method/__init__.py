"""Defines methods: which weights, predicted how far, each forward and backward of a stage uses."""

from typing import TYPE_CHECKING

from spectrain_ext.later import attributes

from .applying import (
    check_optimizer,
    microbatches_of,
    phases_on,
    places_of,
    rules_at,
)
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

__getattr__, __dir__ = attributes(__name__, _ON_FIRST_USE)
