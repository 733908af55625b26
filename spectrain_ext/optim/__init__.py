"""Optimizers with torch.optim's interface whose step can also write predicted weights."""

from .base import PredictingOptimizer
from .optimizers import SGD, SOAP, Adam, AdamW, Muon, NAdam, hidden_matrices
from .parameters import PredictionSink

__all__ = [
    "SGD",
    "SOAP",
    "Adam",
    "AdamW",
    "Muon",
    "NAdam",
    "PredictingOptimizer",
    "PredictionSink",
    "hidden_matrices",
]
