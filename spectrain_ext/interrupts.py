"""Interrupts: a Ctrl-C waits until nothing is half done.

Python raises KeyboardInterrupt between any two steps of the interpreter. Inside ``deferred()`` it
waits: for the end of an instruction, of a change of where weights are. Whatever handler of SIGINT
the caller has is then called, as if the signal had come at that moment. A second Ctrl-C is not
deferred, so that nobody is locked in; where it comes a step may be made in part.

Signals come to the main thread alone; in others, and where SIGINT is ignored or ends the process,
all of this does nothing. Handlers of other signals that raise are not deferred either: their
exception ends a run as any other does, and the true weights are put back.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class _State:
    """What there is once for a process."""

    def __init__(self) -> None:
        self.pending: tuple[int, FrameType | None] | None = None  # the signal that waits
        self.depth = 0  # contexts that are entered, one inside another
        self.waits = False  # for other processes
        self.before: Any = None  # the caller's handler, of when this one was last installed

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.depth and self.pending is None and not self.waits:
            self.pending = number, frame
        else:
            # Also outside of any context, where an exception out of a second Ctrl-C left this
            # handler installed.
            self.pending = None
            self.before(number, frame)

    def install(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        self.pending, self.waits = None, False
        if callable(handler) and handler != self.note:
            self.before = handler
            signal.signal(signal.SIGINT, self.note)

    def remove(self) -> None:
        if signal.getsignal(signal.SIGINT) == self.note:  # the caller has set no other meanwhile
            signal.signal(signal.SIGINT, self.before)


STATE = _State()


def boundary() -> None:
    """Nothing is half done: call the handler of a signal that waits."""
    if STATE.pending is not None:
        noted, STATE.pending = STATE.pending, None
        handler = signal.getsignal(signal.SIGINT)
        if handler == STATE.note:
            handler = STATE.before
        if callable(handler):
            handler(*noted)


def held_back() -> bool:
    """Whether a KeyboardInterrupt waits; any thread may ask."""
    return STATE.pending is not None and STATE.before is signal.default_int_handler


# Not made by contextlib: a signal that comes on the way through its code would be one that a
# context never hears of. What a context then leaves wrong, the one around it puts right.


class deferred:
    """Inside, a Ctrl-C waits for ``boundary``, or for the end; may be entered again inside."""

    __slots__ = ("_outer", "_waits")
    _outer: int | None
    _waits: bool

    def __enter__(self) -> None:
        self._outer = STATE.depth if _in_main_thread() else None
        if self._outer is not None:
            if self._outer == 0:
                STATE.install()
            self._waits, STATE.waits = STATE.waits, False
            STATE.depth = self._outer + 1  # last: without an end nobody would take it back

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            STATE.depth, STATE.waits = self._outer, self._waits
            if self._outer == 0:
                STATE.remove()
                boundary()


class callers:
    """Inside ``deferred``, code of the caller's runs, with the handler that it has, or sets."""

    __slots__ = ("_own",)
    _own: bool

    def __enter__(self) -> None:
        self._own = STATE.depth == 1 and _in_main_thread()
        if self._own:
            STATE.depth = 0
            STATE.remove()
            boundary()

    def __exit__(self, *_: object) -> None:
        if self._own and STATE.depth == 0:
            STATE.depth = 1
            STATE.install()


class waiting:
    """Inside, this process waits for others, and a Ctrl-C comes through."""

    __slots__ = ("_before",)
    _before: bool | None  # None in another thread, whose waits no signal ends

    def __enter__(self) -> None:
        self._before = STATE.waits if _in_main_thread() else None
        if self._before is not None:
            boundary()
            STATE.waits = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            STATE.waits = self._before


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
