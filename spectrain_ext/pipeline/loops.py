"""Follows the loop in which the caller takes results: how it is left, and what continues it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from dis import get_instructions
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, cast
from weakref import finalize, ref

from spectrain_ext.errors import describe_error

if TYPE_CHECKING:
    from .losses import Result

_PACKAGE = f"{__name__.partition('.')[0]}."
#: Python's instructions that take the iterator of a loop off the stack: at ``break`` or ``return``.
#: While an exception leaves a loop, its frame is still at the instruction that raised.
_LEAVING = frozenset(("POP_TOP", "POP_ITER", "END_FOR"))
#: Instructions between the name of a method without arguments and its call.
_CALLING = frozenset(("PRECALL", "CALL"))


def checked_batches(batches: object) -> Iterable[object]:
    if isinstance(batches, Iterable) or hasattr(batches, "__getitem__"):
        return batches  # type: ignore[return-value]
    raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}")


def warn_unless_begun(run: Iterator[Result], begun: list[bool]) -> Iterator[Result]:
    """Return the run; warn if it is dropped before its first step, as when taken for a call."""
    finalize(run, _warn_unless, begun).atexit = False
    return run


def _warn_unless(begun: list[bool]) -> None:
    if not begun:
        warnings.warn(
            "the iterator that run() returned was dropped, and nothing was trained; iterate over "
            "it, or call fit()",
            stacklevel=3,
        )


class CallersLoop:
    """The caller's loop over the results of a pipeline: whether it was left, and why.

    ``with`` it is all that the caller's iterator does. After ``break``, or while an exception ends
    the loop, Python prints what a generator raises and goes on ("Exception ignored"). So an error
    that comes then is kept, for ``raise_ignored``.
    """

    def __init__(self) -> None:
        self._iterator: Callable[[], object] = lambda: None  # weak: what ``run`` returned last
        self._depth = 0  # of iterators, one inside another
        self._dropped = False  # the iterator, instead of closed by a call
        self._ignored: BaseException | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._dropped and error is not None and not isinstance(error, GeneratorExit):
            error.add_note("after the loop was left; the next use of the pipeline raises it")
            self._ignored = error
        self._dropped = False

    def hold(self, iterator: Iterator[Result]) -> None:
        """Note, without keeping it, the iterator that the caller gets."""
        self._iterator = ref(iterator)

    def raise_ignored(self) -> None:
        """Raise, once, the error that came after the caller had left its loop."""
        error, self._ignored = self._ignored, None
        if error is not None:
            raise error

    def note_left(self, end: GeneratorExit, handled: BaseException | None) -> str:
        """Find how the caller has left the loop; return why, unless it has meant to."""
        frame = _callers_frame()
        instruction, called = ("", None) if frame is None else _at(frame)
        # A generator that is dropped loses its weak references first.
        closes = frame is None or (called == "close" and self._iterator() is not None)
        self._dropped = self._depth > 0 and not closes
        error: BaseException | None = end
        while isinstance(error, GeneratorExit):  # those of generators around this one, too
            error = error.__context__
        if error is not None and error is not handled:
            return describe_error(error)
        if closes or instruction in _LEAVING:
            return ""
        return "an exception has ended the loop, or its iterator was dropped"


def _callers_frame() -> FrameType | None:
    """Return the innermost frame outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def _at(frame: FrameType) -> tuple[str, object]:
    """Return the name of the instruction that a frame runs; and, if it calls, what is called."""
    name, called = "", None
    for each in get_instructions(frame.f_code):
        if each.offset > frame.f_lasti:
            break
        name = each.opname
        if name not in _CALLING:
            called = each.argval
    return name, called if name in _CALLING else None


# One loop over the results of several runs.


class Segment:
    """The batches of one run. It takes no more of them than the run asks for."""

    cut = False  # whether it ended because ``ends`` said so
    exhausted = False  # whether no batch was left

    def __init__(self, batches: Iterator[object], ends: Callable[[int], bool]) -> None:
        self._batches, self._ends = batches, ends

    def __iter__(self) -> Iterator[object]:
        for taken in count():
            self.cut = self._ends(taken)
            if self.cut:
                return
            try:
                batch = next(self._batches)
            except StopIteration:
                self.exhausted = True
                return
            yield batch


def segments(
    batches: Iterator[object],  # of all runs
    ends: Callable[[int], bool],  # whether a run that has taken so many batches takes no other
    run: Callable[[Iterable[object]], Iterator[Result]],  # trains, by ``Pipeline.run``
    # Called after each run, and whether the caller has left the loop: returns the number of the
    # next run's first result. None: there is no other run.
    follow: Callable[[Segment, bool], int | None],
    number: int = 0,  # of the first result
) -> Iterator[Result]:
    """Train in one run after another, and drain in between; yield the results of all of them."""
    left, following = False, cast("int | None", number)
    while following is not None:
        segment = Segment(batches, ends)
        results = run(segment)
        try:
            for result in results:
                if not left:  # where another process feeds the runs, they go on to their end
                    yield replace(result, index=following + result.index)
        except GeneratorExit:
            cast("Generator[Result, None, None]", results).close()  # drains
            left = True
        following = follow(segment, left)
