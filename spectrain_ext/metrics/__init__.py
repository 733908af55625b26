"""Figures of a run while it goes on: throughput, bubbles, staleness, prediction errors, loss."""

from spectrain_ext.metrics.metrics import Metrics
from spectrain_ext.metrics.sinks import require_tensorboard

__all__ = ["Metrics", "require_tensorboard"]
