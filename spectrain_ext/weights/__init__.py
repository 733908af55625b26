"""One stage's weights: master, working buffer, kept and predicted versions."""

from .rates import ComingRates, rates_of
from .stage_weights import StageMemory, StageWeights

__all__ = ["ComingRates", "StageMemory", "StageWeights", "rates_of"]
