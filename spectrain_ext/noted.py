"""Noted: what is known of a piece of memory, changed together with the memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import starmap
from typing import Generic, TypeVar

T = TypeVar("T")


class Noted(Generic[T]):
    """A value that can be changed in the same moment in which a native call is made.

    The exception of a signal, as a KeyboardInterrupt, comes between two steps of the interpreter
    and never inside a function written in C. So the call and the note of it are one such function:
    whatever comes, both have been made or neither.
    """

    __slots__ = ("_last",)

    def __init__(self, value: T) -> None:
        self._last: deque[tuple[T, object]] = deque(((value, None),), maxlen=1)

    @property
    def value(self) -> T:
        """The value now."""
        return self._last[0][0]

    def put(self, value: T) -> None:
        """Change the value."""
        self._last.append((value, None))

    def put_after(self, value: T, call: Callable[[], object]) -> None:
        """Make a call, and change the value unless it raises; ``call`` runs no Python of ours."""
        self._last.extend(zip((value,), starmap(call, ((),)), strict=True))
