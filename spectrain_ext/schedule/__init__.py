"""Schedules are data: generators write actions, the executor runs them, a count checks them."""

from .actions import Action, Kind, ScheduleError
from .compute_csv import read_csv, write_csv
from .counting import Met, read, validate
from .generators import FLUSHING, GENERATORS, Generator, find_generator, forwards, streams
from .ledger import Count, Ledger, count_stage, open_ledgers
from .levels import simulate_repeating
from .place import Place, Replicas
from .reading import Backward, Entries, Law, Reader, Reading, Reads, Rules
from .simulation import (
    Durations,
    Horizons,
    Lane,
    Span,
    Summary,
    count_horizons,
    simulate,
    summarize,
)
from .turns import interleave, turns

__all__ = [
    "FLUSHING",
    "GENERATORS",
    "Action",
    "Backward",
    "Count",
    "Durations",
    "Entries",
    "Generator",
    "Horizons",
    "Kind",
    "Lane",
    "Law",
    "Ledger",
    "Met",
    "Place",
    "Reader",
    "Reading",
    "Reads",
    "Replicas",
    "Rules",
    "ScheduleError",
    "Span",
    "Summary",
    "count_horizons",
    "count_stage",
    "find_generator",
    "forwards",
    "interleave",
    "open_ledgers",
    "read",
    "read_csv",
    "simulate",
    "simulate_repeating",
    "streams",
    "summarize",
    "turns",
    "validate",
    "write_csv",
]
