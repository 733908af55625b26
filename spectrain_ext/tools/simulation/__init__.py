"""Checks and simulates schedules; a run needs none of it."""

from spectrain_ext.schedule import check_generator, device_order, validate

from .replicas import simulate_ranks
from .timing import Durations, Lane, Span, Summary, simulate, streams, summarize

__all__ = [
    "Durations",
    "Lane",
    "Span",
    "Summary",
    "check_generator",
    "device_order",
    "simulate",
    "simulate_ranks",
    "streams",
    "summarize",
    "validate",
]
