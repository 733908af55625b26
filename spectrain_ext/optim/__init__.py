"""Optimizers with torch.optim's interface whose step can also write predicted weights."""

from typing import TYPE_CHECKING

from spectrain_ext.later import attributes

from .base import PredictingOptimizer
from .optimizers import SGD, Adam, AdamW, NAdam

if TYPE_CHECKING:
    from .lion import Lion
    from .matrices import SOAP, Muon, hidden_matrices

__all__ = [
    "SGD",
    "SOAP",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "NAdam",
    "PredictingOptimizer",
    "hidden_matrices",
]

_ON_FIRST_USE = dict.fromkeys(("SOAP", "Muon", "hidden_matrices"), "matrices")
_ON_FIRST_USE["Lion"] = "lion"
__getattr__, __dir__ = attributes(__name__, _ON_FIRST_USE)
