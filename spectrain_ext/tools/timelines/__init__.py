"""Draws measured and simulated timelines, and writes them as traces."""

from .method_timeline import devices_under, simulate_method
from .timeline import draw_timeline, write_trace

__all__ = [
    "devices_under",
    "draw_timeline",
    "simulate_method",
    "write_trace",
]
