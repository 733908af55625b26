"""Defines methods: which weights, predicted how far, each forward and backward of a stage uses."""

from .formulas import delay, delay_under, recipe_clip
from .places import (
    Window,
    microbatches_of,
    numbers_of,
    phase_places,
    places_of,
    put_off_by,
)
from .registry import (
    find_method,
    hybrid,
    interleaved,
    methods,
    pipemare,
    second_order,
    spectrain,
    xgrad,
)
from .rules import check, check_optimizer, check_replicas, in_words, rules_at
from .value import Method, Phase, chunks_of, factor_of, phases_of

__all__ = [
    "Method",
    "Phase",
    "Window",
    "check",
    "check_optimizer",
    "check_replicas",
    "chunks_of",
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
    "phase_places",
    "phases_of",
    "pipemare",
    "places_of",
    "put_off_by",
    "recipe_clip",
    "rules_at",
    "second_order",
    "spectrain",
    "xgrad",
]
