"""What exists only because there are several processes: one stage in each, linked by messages."""

from .pipeline import DistributedPipeline

__all__ = ["DistributedPipeline"]
