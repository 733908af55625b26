"""Checks and simulates schedules; a run needs none of it."""

from spectrain_ext.schedule.order import check_generator, device_order, validate

from .ranks import simulate_ranks
from .timing import Durations, Lane, Span, Summary, simulate, simulate_period, streams, summarize

__all__ = [
    "Durations",
    "Lane",
    "Span",
    "Summary",
    "check_generator",
    "device_order",
    "simulate",
    "simulate_period",
    "simulate_ranks",
    "streams",
    "summarize",
    "validate",
]
