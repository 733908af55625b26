"""Records traces and metrics of a run."""

from .metrics import Metrics
from .progress_bar import progress_shown as progress_shown
from .trace import Trace

__all__ = ["Metrics", "Trace"]
