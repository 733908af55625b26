"""Looks on at a run while it goes on: traces, figures, and where they are written."""

from .metrics import Metrics
from .trace import Trace

__all__ = ["Metrics", "Trace"]
