"""Schedules are data: generators write actions, the executor runs them, a count checks them."""

from .actions import Action, Kind, ScheduleError
from .compute_csv import read_csv, write_csv
from .counting import Met, follow, open_ledgers, read, updates_between
from .generators import FLUSHING, GENERATORS, Generator, find_generator
from .gpipe import gpipe
from .interleaving import interleave
from .ledger import Count, Ledger, Reading, Rules
from .levels import simulate_repeating
from .one_f_one_b import asynchronous, flushing
from .place import Place, ReplicaPlace
from .replicas import Replicas
from .rounds import Horizons, count_horizons
from .simulation import Durations, Lane, Span, Summary, simulate, summarize
from .turns import streams, turns
from .validation import validate

__all__ = [
    "FLUSHING",
    "GENERATORS",
    "Action",
    "Count",
    "Durations",
    "Generator",
    "Horizons",
    "Kind",
    "Lane",
    "Ledger",
    "Met",
    "Place",
    "Reading",
    "ReplicaPlace",
    "Replicas",
    "Rules",
    "ScheduleError",
    "Span",
    "Summary",
    "asynchronous",
    "count_horizons",
    "find_generator",
    "flushing",
    "follow",
    "gpipe",
    "interleave",
    "open_ledgers",
    "read",
    "read_csv",
    "simulate",
    "simulate_repeating",
    "streams",
    "summarize",
    "turns",
    "updates_between",
    "validate",
    "write_csv",
]
