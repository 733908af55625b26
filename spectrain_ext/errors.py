"""The exceptions that only a pipeline raises; bad arguments are plain TypeError and ValueError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class StageError(RuntimeError):
    """An exception inside a stage, the loss or an optimizer ended the run.

    The original exception is the cause (``__cause__``). The minibatches in flight were dropped, no
    further update was made, the modules hold their true weights and the pipeline can run again.

    Attributes:
        stage: index of the stage, counted from 0.
        minibatch: index of the minibatch within the run, counted from 0.
        action: what the stage was doing, for example ``"forward"``, ``"loss"``, ``"backward"`` or
            ``"update"``.
        reason: type and text of the original exception.
    """

    def __init__(self, stage: int, minibatch: int, action: str, reason: str) -> None:
        super().__init__(stage, minibatch, action, reason)  # these args make it picklable
        self.stage = stage
        self.minibatch = minibatch
        self.action = action
        self.reason = reason

    def __str__(self) -> str:
        return f"stage {self.stage}, minibatch {self.minibatch}, {self.action}: {self.reason}"


class OrderingError(RuntimeError):
    """A buffer was used on a stream that had not waited for a conflicting use on another."""


class RankError(RuntimeError):
    """The run of a pipeline over several processes was ended, by whatever rank failed first.

    Every rank that survives raises it, with the same first cause; the rank that failed raises its
    own exception. The modules hold their true weights; the pipeline cannot run again, since what
    was in flight between the ranks is lost: start again from a checkpoint.

    Attributes:
        rank: the rank that reports.
        action: what it was doing.
        culprit: the rank that failed first.
        reason: what is known of the first cause: that rank's action and exception, or how it was
            missed.
        edge: the edge that the reporting rank was waiting on, None if it was not waiting.
        waited: for how many seconds it had.
        report: the file that says more of all ranks, empty if there is none; with the name of the
            host in front if it is another one.
    """

    def __init__(
        self,
        rank: int,
        action: str,
        culprit: int,
        reason: str,
        edge: str | None = None,
        waited: float = 0.0,
        report: str = "",
    ) -> None:
        super().__init__(rank, action, culprit, reason, edge, waited, report)
        self.rank = rank
        self.action = action
        self.culprit = culprit
        self.reason = reason
        self.edge = edge
        self.waited = waited
        self.report = report

    def __str__(self) -> str:
        waiting = "" if self.edge is None else f", waiting on {self.edge} for {self.waited:.1f} s"
        return (
            f"rank {self.rank}, {self.action}{waiting}; first cause: rank {self.culprit}, "
            f"{self.reason}{report_note(self.report, '; ')}"
        )


def report_note(report: str, before: str = "") -> str:
    return f"{before}report of all ranks: {report}" if report else ""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, is damaged, or does not fit; the message names the file.

    A failed save leaves earlier checkpoints whole, a failed load leaves everything as it was.
    """


def make_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call, also if one raises; the first one's exception is then raised."""
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
            del first  # whose traceback has this frame


@contextmanager
def placed(where: str) -> Iterator[None]:
    """What is raised inside gets a note that says where that was."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(where)
        raise


@contextmanager
def noted_on(cause: BaseException) -> Iterator[None]:
    """What goes wrong inside, after ``cause`` has been raised, becomes a note on it."""
    try:
        yield
    except Exception as error:
        # A device that has failed fails every call: the last one says nothing of why.
        if error is not cause and hasattr(cause, "add_note"):  # Python 3.11
            cause.add_note(f"and then, at the end of the run: {type(error).__name__}: {error}")
