"""Saves and loads checkpoints atomically, for any number of stages."""

from spectrain_ext.errors import CheckpointError

from .loading import Loaded, load
from .manager import CheckpointManager
from .sampler import Sampler, ShuffledSampler
from .saving import save

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Loaded",
    "Sampler",
    "ShuffledSampler",
    "load",
    "save",
]
