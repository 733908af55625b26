"""Checks and simulates schedules, and reads and writes them as files; a run needs none of it."""

from spectrain_ext.schedule.devices import device_order
from spectrain_ext.schedule.order import check_generator, validate

from .compute_csv import read_csv, write_csv
from .ranks import simulate_ranks
from .repeating import simulate_repeating
from .timing import (
    Durations,
    Met,
    Reading,
    Summary,
    lay_out,
    read,
    simulate,
    streams,
    summarize,
)

__all__ = [
    "Durations",
    "Met",
    "Reading",
    "Summary",
    "check_generator",
    "device_order",
    "lay_out",
    "read",
    "read_csv",
    "simulate",
    "simulate_ranks",
    "simulate_repeating",
    "streams",
    "summarize",
    "validate",
    "write_csv",
]
