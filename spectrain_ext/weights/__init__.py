"""Holds one stage's weights: true, stashed and predicted versions."""

from .stage_weights import StageMemory, StageWeights
from .storage import rates_of

__all__ = ["StageMemory", "StageWeights", "rates_of"]
