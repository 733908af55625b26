"""Defers Ctrl-C until nothing is half done.

Python may raise KeyboardInterrupt between any two bytecodes. Inside ``deferred()`` it waits until
an instruction has ended, or weights have been moved; then the handler of SIGINT is called as
if the signal had arrived at that moment. A second Ctrl-C is not deferred, so that you can always
stop the process; a step may then be partly done.

Signals reach only the main thread. In other threads, and where SIGINT is ignored or ends the
process, nothing is deferred. Handlers of other signals that raise are not deferred either: their
exception ends a run as any other does, and the true weights are put back.
"""

from __future__ import annotations

import signal
import threading
from types import CodeType, FrameType
from typing import Any

# Not the functions of ``signal``: these look for members of enums and fail to find a handler in 8
# and 3 us, at each result four times. Below they take 0.4 and 0.07 us.
_set_handler = signal._signal.signal  # type: ignore[attr-defined]
_handler_of = signal._signal.getsignal  # type: ignore[attr-defined]


class _State:
    """The state of the process."""

    def __init__(self) -> None:
        self.pending: tuple[int, FrameType | None] | None = None  # the deferred signal
        self.depth = 0  # how many contexts are entered, one inside another
        self.waits = False  # for other processes
        self.before: Any = None  # the caller's handler when this one was installed

    def note(self, number: int, frame: FrameType | None) -> None:
        # A context that is being left calls the handler itself, in the next line or two.
        leaves = self.pending is not None and _runs(deferred.__exit__.__code__, frame)
        if self.depth and (self.pending is None or leaves) and not self.waits:
            self.pending = number, frame
            return
        self.pending = None
        if not self.depth:  # on the way into or out of a context, which an exception cuts short
            self.remove()
        self.before(number, frame)

    def install(self) -> None:
        handler = _handler_of(signal.SIGINT)
        self.pending, self.waits = None, False
        if callable(handler) and handler != self.note:
            self.before = handler
            _set_handler(signal.SIGINT, self.note)

    def remove(self) -> None:
        if _handler_of(signal.SIGINT) == self.note:  # else the caller has set another
            _set_handler(signal.SIGINT, self.before)


STATE = _State()


def boundary() -> None:
    """Call the handler of a deferred signal: nothing is half done here."""
    if STATE.pending is not None:
        noted, STATE.pending = STATE.pending, None
        handler = _handler_of(signal.SIGINT)
        if handler == STATE.note:
            handler = STATE.before
        if callable(handler):
            handler(*noted)


def held_back() -> bool:
    """Whether a KeyboardInterrupt is deferred; any thread may ask."""
    return STATE.pending is not None and STATE.before is signal.default_int_handler


# Classes, not contextlib: a signal inside contextlib's code would bypass the context. The outer
# context corrects what an inner one leaves wrong.


class deferred:
    """Defers Ctrl-C inside until ``boundary``, or until the end; may be nested."""

    __slots__ = ("_outer", "_waits")
    _outer: int | None
    _waits: bool

    def __enter__(self) -> None:
        self._outer = STATE.depth if _in_main_thread() else None
        if self._outer is not None:
            if self._outer == 0:
                STATE.install()
            self._waits, STATE.waits = STATE.waits, False
            STATE.depth = self._outer + 1  # last: no __exit__ follows an exception in here

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            STATE.depth, STATE.waits = self._outer, self._waits
            if self._outer == 0:
                STATE.remove()
                boundary()


class callers:
    """Runs the caller's code, with the caller's handler, inside ``deferred``."""

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
    """Marks a wait for other processes, in which Ctrl-C is not deferred."""

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


def _runs(code: CodeType, frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it, runs this code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
