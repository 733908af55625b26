"""Generates and counts schedules, which are data: streams of instructions."""

from typing import TYPE_CHECKING, Any

from .generators import (
    FLUSHING,
    GENERATORS,
    Generator,
    ScheduleName,
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
    ScheduleError,
    backward,
    backward_input,
    backward_weights,
    forward,
)
from .ledger import Count, Ledger, count_stage
from .lowering import plain_steps, steps
from .place import Place, Replicas
from .reading import Backward, Entries, Law, OwnLaw, Reader, Reads, Rules

if TYPE_CHECKING:
    from .chunked import Interleaved, WPipe

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
    "Law",
    "Ledger",
    "OwnLaw",
    "Place",
    "Reader",
    "Reads",
    "Replicas",
    "Rules",
    "ScheduleError",
    "ScheduleName",
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


def __getattr__(name: str) -> Any:
    if name not in ("Interleaved", "WPipe"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import chunked  # loaded on first use

    return getattr(chunked, name)
