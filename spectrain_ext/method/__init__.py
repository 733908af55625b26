"""Methods: which weights, predicted how far, each forward and backward of a stage computes with."""

from .checking import check, check_optimizer
from .choices import Choices, choices_at, places_of
from .reading import reading_rules
from .registry import find_method, methods, second_order, xgrad
from .rules import recipe_clip
from .value import Backward, Method, Reads

__all__ = [
    "Backward",
    "Choices",
    "Method",
    "Reads",
    "check",
    "check_optimizer",
    "choices_at",
    "find_method",
    "methods",
    "places_of",
    "reading_rules",
    "recipe_clip",
    "second_order",
    "xgrad",
]
