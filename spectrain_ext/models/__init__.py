"""Models that the command line trains, as lists of pipeline stages."""

from spectrain_ext.models.partition import cut_evenly
from spectrain_ext.models.residual_mlp import ResidualBlock, residual_mlp

__all__ = ["ResidualBlock", "cut_evenly", "residual_mlp"]
