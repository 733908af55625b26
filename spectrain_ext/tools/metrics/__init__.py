"""Records traces and metrics of a run."""

from .metrics import Metrics
from .trace import Trace

__all__ = ["Metrics", "Trace"]
