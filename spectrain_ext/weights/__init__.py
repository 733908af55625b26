"""One stage's weights: master, working buffer, kept and predicted versions."""

from .memory import StageMemory
from .rates import ComingRates
from .stage_weights import StageWeights

__all__ = ["ComingRates", "StageMemory", "StageWeights"]
