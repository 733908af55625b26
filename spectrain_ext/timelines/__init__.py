"""Draws measured and simulated timelines, and writes them as traces."""

from .merging import merge_traces
from .method_timeline import devices_under, simulate_method
from .timeline import draw_timeline, write_trace

__all__ = [
    "devices_under",
    "draw_timeline",
    "merge_traces",
    "simulate_method",
    "write_trace",
]
