"""Optimizers with torch.optim's interface whose step can also write predicted weights."""

from .adam import Adam, AdamW, NAdam
from .base import PredictingOptimizer
from .parameters import PredictionSink
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "NAdam", "PredictingOptimizer", "PredictionSink"]
