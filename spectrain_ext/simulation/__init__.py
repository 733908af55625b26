"""Checks and simulates schedules, and reads and writes them as files; a run needs none of it."""

from spectrain_ext.schedule.order import check_generator, device_order, validate

from .compute_csv import read_csv, write_csv
from .ranks import simulate_ranks
from .repeating import simulate_repeating
from .timing import Durations, Summary, simulate, streams, summarize

__all__ = [
    "Durations",
    "Summary",
    "check_generator",
    "device_order",
    "read_csv",
    "simulate",
    "simulate_ranks",
    "simulate_repeating",
    "streams",
    "summarize",
    "validate",
    "write_csv",
]
