"""Saves and loads checkpoints atomically, for any number of stages."""

from typing import TYPE_CHECKING

from spectrain_ext.errors import CheckpointError
from spectrain_ext.later import attributes

from .parts import Stateful
from .saving import save

if TYPE_CHECKING:
    from .loading import Loaded, load
    from .manager import CheckpointManager
    from .sampler import ShuffledSampler

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Loaded",
    "ShuffledSampler",
    "Stateful",
    "load",
    "save",
]

_ON_FIRST_USE = {
    "CheckpointManager": "manager",
    "Loaded": "loading",
    "ShuffledSampler": "sampler",
    "load": "loading",
}

__getattr__, __dir__ = attributes(__name__, _ON_FIRST_USE)
