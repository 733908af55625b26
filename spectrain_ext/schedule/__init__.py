"""Schedules are data: generators write actions, the executor runs them, a count checks them."""

from .compute_csv import read_csv, write_csv
from .counting import Met, check_generator, read, validate
from .devices import device_order, lay_out
from .generators import (
    FLUSHING,
    GENERATORS,
    Generator,
    Interleaved,
    WPipe,
    find_generator,
    flushes,
    name_of,
    put_off,
    streams,
    takes_window,
)
from .instructions import (
    Instruction,
    Kind,
    ScheduleError,
    backward,
    backward_input,
    backward_weights,
    forward,
)
from .interleaving import bounded, interleave
from .ledger import Count, Ledger, count_stage, open_ledgers
from .levels import simulate_repeating
from .lowering import Duties, lower, tables
from .place import Place, Replicas
from .reading import Backward, Entries, Law, OwnLaw, Reader, Reading, Reads, Rules
from .sharing import simulate_ranks
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

__all__ = [
    "FLUSHING",
    "GENERATORS",
    "Backward",
    "Count",
    "Durations",
    "Duties",
    "Entries",
    "Generator",
    "Horizons",
    "Instruction",
    "Interleaved",
    "Kind",
    "Lane",
    "Law",
    "Ledger",
    "Met",
    "OwnLaw",
    "Place",
    "Reader",
    "Reading",
    "Reads",
    "Replicas",
    "Rules",
    "ScheduleError",
    "Span",
    "Summary",
    "WPipe",
    "backward",
    "backward_input",
    "backward_weights",
    "bounded",
    "check_generator",
    "count_horizons",
    "count_stage",
    "device_order",
    "find_generator",
    "flushes",
    "forward",
    "interleave",
    "lay_out",
    "lower",
    "name_of",
    "open_ledgers",
    "put_off",
    "read",
    "read_csv",
    "simulate",
    "simulate_ranks",
    "simulate_repeating",
    "streams",
    "summarize",
    "tables",
    "takes_window",
    "validate",
    "write_csv",
]
