"""Runs a pipeline whose stages are in several processes."""

from .distributed_pipeline import DistributedPipeline
from .store import join_ranks

__all__ = ["DistributedPipeline", "join_ranks"]
