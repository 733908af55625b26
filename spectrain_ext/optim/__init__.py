"""Optimizers with torch.optim's interface whose step can also write predicted weights."""

from spectrain_ext.optim.binding import PredictionSink
from spectrain_ext.optim.sgd import SGD

__all__ = ["SGD", "PredictionSink"]
