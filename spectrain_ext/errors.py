"""Defines the exceptions of pipelines; wrong arguments raise plain TypeError or ValueError."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")

_MOST = 10**18  # limit of numbers, so that sums, products and squares stay finite

# Pickle makes these again from their positional arguments.


@dataclass(eq=False, repr=False)
class StageError(RuntimeError):
    """An exception inside a stage, the loss or an optimizer ended the run.

    The original exception is its cause (``__cause__``). The minibatches in flight are dropped, no
    further update is made, the modules hold their true weights, and the pipeline can run again.

    Attributes:
        stage: index of the stage, counted from 0.
        minibatch: index of the minibatch within the run, counted from 0.
        action: what the stage was doing, for example ``"forward"``, ``"loss"``, ``"backward"`` or
            ``"update"``.
        reason: type and text of the original exception.
    """

    stage: int
    minibatch: int
    action: str
    reason: str

    def __str__(self) -> str:
        return f"stage {self.stage}, minibatch {self.minibatch}, {self.action}: {self.reason}"


@dataclass(eq=False, repr=False)
class RankError(RuntimeError):
    """A failed rank ended the run of a pipeline over several processes.

    Every surviving rank raises this, with the same first cause; the failed rank raises its own
    exception. The modules hold their true weights. The pipeline cannot run again, because messages
    between ranks are lost: start again from a checkpoint.

    Attributes:
        rank: the rank that reports.
        action: what it was doing.
        culprit: the rank that failed first; if it is not of this pipeline, the reason says so.
        reason: the first cause, as far as known: what that rank did and its exception, or
            how its absence was noticed.
        edge: the edge that the reporting rank was waiting on, None if it was not waiting.
        waited: how long it had waited, in seconds.
        report: the file with a report of this machine's ranks; empty if there is none.
    """

    rank: int
    action: str
    culprit: int
    reason: str
    edge: str | None = None
    waited: float = 0.0
    report: str = ""

    def __str__(self) -> str:
        waiting = "" if self.edge is None else f", waiting on {self.edge} for {self.waited:.1f} s"
        return (
            f"rank {self.rank}, {self.action}{waiting}; first cause: rank {self.culprit}, "
            f"{self.reason}{report_note(self.report, '; ')}"
        )


def report_note(report: str, before: str = "") -> str:
    return f"{before}report of this machine's ranks: {report}" if report else ""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, is damaged, or does not fit; the message names the file.

    A failed save leaves earlier checkpoints intact; a failed load changes nothing.
    """


def kind_of(dtype: torch.dtype) -> str:
    """Return a dtype's kind of numbers; dtypes of one kind differ in precision only."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "bool" if dtype is torch.bool else "integer"


def differing(one: str, other: str) -> str:
    """Return the message for two names of one tensor to which a file gives different values."""
    return (
        f"{one!r} and {other!r} are one tensor of this model, which ties them, but have different "
        "values; load into a model that does not tie them (for one of Hugging Face: "
        "tie_word_embeddings=False in its configuration), or give both the same values"
    )


def unknown(name: str, names: Collection[str]) -> str:
    """Say that there is no such name, and which ones it may be a typo of, or else all there are."""
    close = get_close_matches(name.lower(), names)
    if close:
        return f"there is no {name!r}; did you mean {' or '.join(map(repr, close))}?"
    return f"there is no {name!r}; there are {', '.join(names)}"


def check_int(where: str, value: object, least: int) -> None:
    """Raise TypeError or ValueError unless it is an int of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{where}: expected at least {least}, got {value}")


def check_number(name: str, value: float, least: float = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {reprlib.repr(value)}")
    if not least <= value <= _MOST:
        raise ValueError(
            f"{name}: expected a number from {least} to {_MOST:.0e}, got {reprlib.repr(value)}"
        )


def one_each(name: str, values: float | Sequence[float], count: int, of: str) -> tuple[float, ...]:
    """Return ``count`` positive numbers: ``values``, or the single one repeated."""
    numbers = tuple(values) if isinstance(values, Sequence) else (values,) * count
    if len(numbers) != count:
        raise ValueError(f"{name}: expected one per {of} ({count}), got {len(numbers)}")
    for number in numbers:
        check_number(name, number, 1 / _MOST)
    return numbers


def made_of(kind: Callable[..., Made], entries: Sequence[Any], where: str) -> tuple[Made, ...]:
    """Make objects from a file's entries; an error names the entry."""
    made = []
    for number, fields in enumerate(entries):
        try:
            made.append(kind(**fields))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}[{number}]: {error}") from error
    return tuple(made)


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def make_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call, even if one raises; then raise the first exception."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as error:
            first = first or error
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback has this frame


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Add a note with the place to exceptions raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


@contextmanager
def noted_on(cause: BaseException) -> Iterator[None]:
    """Turn an exception inside, after ``cause`` has been raised, into a note on ``cause``."""
    try:
        yield
    except Exception as error:
        # On a device that has failed every call fails: the last one does not explain why.
        if error is not cause:
            cause.add_note(f"and then, at the end of the run: {type(error).__name__}: {error}")
