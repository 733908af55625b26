"""Schedules are data: generators write actions, the executor runs them, a count checks them."""

from .actions import Action, Kind
from .counting import Versions, count_versions
from .cursor import Cursor, Extent
from .one_f_one_b import one_f_one_b

__all__ = ["Action", "Cursor", "Extent", "Kind", "Versions", "count_versions", "one_f_one_b"]
