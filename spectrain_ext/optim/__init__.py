"""Optimizers with torch.optim's interface whose step can also write predicted weights."""

from typing import TYPE_CHECKING, Any

from .base import PredictingOptimizer
from .optimizers import SGD, Adam, AdamW, NAdam

if TYPE_CHECKING:
    from .matrices import SOAP, Muon, hidden_matrices

__all__ = [
    "SGD",
    "SOAP",
    "Adam",
    "AdamW",
    "Muon",
    "NAdam",
    "PredictingOptimizer",
    "hidden_matrices",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import matrices  # loaded on first use

    return getattr(matrices, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
