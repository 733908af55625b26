"""Optimizers with torch.optim's interface whose step can also write predicted weights."""

from spectrain_ext.optim.adam import Adam, AdamW
from spectrain_ext.optim.base import PredictingOptimizer
from spectrain_ext.optim.binding import PredictionSink
from spectrain_ext.optim.nadam import NAdam
from spectrain_ext.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "NAdam", "PredictingOptimizer", "PredictionSink"]
