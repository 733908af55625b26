"""Noted calls: native calls of which it is known whether they have been made."""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap


def make_noted(call: Callable[[], object], notes: list[object]) -> None:
    """Make a native call, and add a note of it, with no moment in between.

    The exception of a signal, such as a KeyboardInterrupt, comes between two steps of the
    interpreter and never inside a function written in C. So the call and the note are one such
    function: whatever comes, both have been made or neither.

    Args:
        call: runs no Python code once it has begun to write.
        notes: gets an entry, unless the call raises.
    """
    notes.extend(starmap(call, ((),)))
