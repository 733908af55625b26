"""Holds one stage's weights: true, stashed and predicted versions."""

from .rates import paced, rates_of
from .stage_weights import StageMemory, StageWeights

__all__ = ["StageMemory", "StageWeights", "paced", "rates_of"]
