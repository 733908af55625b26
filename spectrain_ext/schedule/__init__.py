"""Generates and counts schedules, which are data: streams of instructions."""

from .generators import (
    FLUSHING,
    GENERATORS,
    Generator,
    Interleaved,
    WPipe,
    bounded,
    find_generator,
    flushes,
    name_of,
    put_off,
    takes_window,
)
from .instructions import (
    COMPUTE,
    Instruction,
    Kind,
    Lane,
    ScheduleError,
    Span,
    backward,
    backward_input,
    backward_weights,
    forward,
)
from .ledger import Count, Ledger, count_stage
from .lowering import plain_steps, steps
from .place import Place, Replicas
from .reading import Backward, Entries, Law, OwnLaw, Reader, Reads, Rules

__all__ = [
    "COMPUTE",
    "FLUSHING",
    "GENERATORS",
    "Backward",
    "Count",
    "Entries",
    "Generator",
    "Instruction",
    "Interleaved",
    "Kind",
    "Lane",
    "Law",
    "Ledger",
    "OwnLaw",
    "Place",
    "Reader",
    "Reads",
    "Replicas",
    "Rules",
    "ScheduleError",
    "Span",
    "WPipe",
    "backward",
    "backward_input",
    "backward_weights",
    "bounded",
    "count_stage",
    "find_generator",
    "flushes",
    "forward",
    "name_of",
    "plain_steps",
    "put_off",
    "steps",
    "takes_window",
]
