"""Fused operators on lists of arrays, prepared plans, and prediction laws."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import laws

if TYPE_CHECKING:
    from .functions import (
        adam_predict,
        distance,
        extrapolate,
        lion_predict,
        predict,
        predict_,
        restore_,
        stash,
        stash_predict_,
        swap_,
    )
    from .plan import Plan
    from .steps import adam_step_, lion_step_, sgd_step_

__all__ = [
    "Plan",
    "adam_predict",
    "adam_step_",
    "distance",
    "extrapolate",
    "laws",
    "lion_predict",
    "lion_step_",
    "predict",
    "predict_",
    "restore_",
    "sgd_step_",
    "stash",
    "stash_predict_",
    "swap_",
]


def __getattr__(name: str) -> Any:
    # A pipeline calls none of them. The first one registers all in torch.ops.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for file in ("functions", "steps", "plan"):
        operators = vars(import_module(f".{file}", __name__))
        globals().update((each, operators[each]) for each in __all__ if each in operators)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
