"""Fused operators on lists of arrays, prepared plans, prediction laws and gradient corrections."""

from . import corrections, laws
from .functions import (
    adam_predict,
    distance,
    extrapolate,
    predict,
    predict_,
    restore_,
    stash,
    stash_predict_,
    swap_,
)
from .plan import Plan
from .steps import adam_step_, sgd_step_

__all__ = [
    "Plan",
    "adam_predict",
    "adam_step_",
    "corrections",
    "distance",
    "extrapolate",
    "laws",
    "predict",
    "predict_",
    "restore_",
    "sgd_step_",
    "stash",
    "stash_predict_",
    "swap_",
]
