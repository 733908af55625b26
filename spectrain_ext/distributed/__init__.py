"""What exists only because there are several processes: their stages, linked by messages."""

from .pipeline import DistributedPipeline
from .store import join_ranks

__all__ = ["DistributedPipeline", "join_ranks"]
