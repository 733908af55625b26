"""Saves and loads checkpoints atomically, for any number of stages."""

from spectrain_ext.errors import CheckpointError

from .loading import Loaded, load
from .manager import CheckpointManager
from .parts import Stateful
from .sampler import ShuffledSampler
from .saving import save

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Loaded",
    "ShuffledSampler",
    "Stateful",
    "load",
    "save",
]
