"""Schedules are data: generators write actions, the executor runs them, a count checks them."""

from .actions import Action, Kind
from .counting import Versions, count_versions
from .cursor import Cursor, Extent
from .generators import GENERATORS, Generator, find_generator
from .gpipe import gpipe
from .one_f_one_b import asynchronous, flushing, one_f_one_b
from .place import Place

__all__ = [
    "GENERATORS",
    "Action",
    "Cursor",
    "Extent",
    "Generator",
    "Kind",
    "Place",
    "Versions",
    "asynchronous",
    "count_versions",
    "find_generator",
    "flushing",
    "gpipe",
    "one_f_one_b",
]
