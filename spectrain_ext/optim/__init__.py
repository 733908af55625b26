"""Optimizers with torch.optim's interface whose step can also write predicted weights."""

from .adam import Adam, AdamW
from .base import PredictingOptimizer
from .binding import PredictionSink
from .nadam import NAdam
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "NAdam", "PredictingOptimizer", "PredictionSink"]
