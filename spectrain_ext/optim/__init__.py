"""Optimizers with torch.optim's interface whose step can also write predicted weights."""

from .base import PredictingOptimizer
from .optimizers import SGD, Adam, AdamW, NAdam
from .parameters import PredictionSink

__all__ = ["SGD", "Adam", "AdamW", "NAdam", "PredictingOptimizer", "PredictionSink"]
