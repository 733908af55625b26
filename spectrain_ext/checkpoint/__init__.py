"""Checkpoints: saved from any number of stages, loaded into any other, never half written."""

from spectrain_ext.checkpoint.loading import Loaded, load
from spectrain_ext.checkpoint.manager import CheckpointManager
from spectrain_ext.checkpoint.saving import Sampler, save
from spectrain_ext.errors import CheckpointError

__all__ = ["CheckpointError", "CheckpointManager", "Loaded", "Sampler", "load", "save"]
