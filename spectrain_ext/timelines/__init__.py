"""Draws what ran when: measured and simulated, as a picture and as a trace."""

from .merging import merge_traces
from .method_timeline import draw_method_timelines, simulate_method
from .timeline import draw_timeline, require_matplotlib, write_trace

__all__ = [
    "draw_method_timelines",
    "draw_timeline",
    "merge_traces",
    "require_matplotlib",
    "simulate_method",
    "write_trace",
]
