"""Generates and counts schedules, which are data: streams of instructions."""

from typing import TYPE_CHECKING

from spectrain_ext.later import attributes

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
from .lowering import STEPS_OF_TRAINING, plain_steps, steps
from .place import Place, Replicas
from .reading import Backward, Entries, Law, OwnLaw, Reader, Reads, Rules

if TYPE_CHECKING:
    from .chunked import Interleaved, WPipe
    from .order import check_generator, device_order, open_ledgers, receive, validate

__all__ = [
    "COMPUTE",
    "FLUSHING",
    "GENERATORS",
    "STEPS_OF_TRAINING",
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
    "check_generator",
    "count_stage",
    "device_order",
    "find_generator",
    "flushes",
    "forward",
    "name_of",
    "open_ledgers",
    "plain_steps",
    "put_off",
    "receive",
    "steps",
    "takes_window",
    "validate",
]

_ON_FIRST_USE = {
    **dict.fromkeys(("Interleaved", "WPipe"), "chunked"),
    **dict.fromkeys(
        ("check_generator", "device_order", "open_ledgers", "receive", "validate"), "order"
    ),
}

__getattr__, __dir__ = attributes(__name__, _ON_FIRST_USE)
