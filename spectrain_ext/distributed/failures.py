"""Failures: what ranks say of themselves, and which of them a wait in vain comes down to."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple


class Cause(NamedTuple):
    """Which rank failed first, and what is known of it."""

    rank: int
    reason: str
    found: int | None = None  # by which rank; None: by each for itself, without the store
    report: str = ""  # that this rank writes, as "host:path"
    gone: bool = False  # whether its connections have broken: it says nothing any more

    @staticmethod
    def read(text: bytes) -> Cause | None:
        """What ``json.dumps`` of a cause wrote; None for no text."""
        return Cause(*json.loads(text)) if text else None


class Beat(NamedTuple):
    """What a rank last said of itself."""

    text: bytes  # as it was said
    heard: float  # when this rank heard it, on its own clock
    doing: str = "starting"
    busy: float = 0.0  # seconds that it had been doing that
    waits: tuple[int | None, str] | None = None  # for whom (None: all others), and on which edge
    words: int = 0  # that it has said so far
    last: Sequence[Any] = ()  # of these
    complete: int = 0  # words that all have said, as far as it has heard
    knows: bool = False  # of a failure, and has told what belongs in its report
    reported: bool = False  # has written that, or knows that it has been
    process: Sequence[Any] = ()  # as ``this_process`` says

    @staticmethod
    def read(text: bytes, heard: float) -> Beat:
        said = json.loads(text)
        return Beat(text, heard, **{**said, "waits": said["waits"] and tuple(said["waits"])})

    @property
    def news(self) -> tuple[int, int, bool]:
        """What others may be waiting for."""
        return self.words, self.complete, self.knows

    def __str__(self) -> str:
        return f"last known in {self.doing}"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def this_process() -> list[Any]:
    """Its host, who started it there, and its number."""
    return [socket.gethostname(), os.getppid(), os.getpid()]


def wake_stopped(process: Sequence[Any]) -> None:
    """Let a process go on that was stopped (SIGSTOP) here, so that it can end as the others do.

    Only one that the same launcher has started. It does not hear torchrun's SIGTERM while it is
    stopped, and SIGKILL comes 30 s later, whatever ``--shutdown-timeout`` says (torch 2.13).
    """
    host, launcher, _ = this_process()
    if list(process[:2]) != [host, launcher]:
        return
    with suppress(OSError):  # it has ended, or there is no such file on this system
        about = Path(f"/proc/{process[2]}/stat").read_text().rpartition(")")[2].split()
        if about[:2] == ["T", str(launcher)]:
            os.kill(process[2], signal.SIGCONT)


def most_silent(beats: Sequence[Beat], me: int) -> tuple[int, float]:
    """The other rank that was heard of the longest ago, and the seconds since."""
    rank = min((r for r in range(len(beats)) if r != me), key=lambda r: beats[r].heard)
    return rank, monotonic() - beats[rank].heard


def suspect(
    beats: Sequence[Beat], me: int, peer: int | None, patience: float
) -> tuple[Cause, float]:
    """Follow who waits for whom, to a rank that is silent or waits for nobody.

    Returns that rank, and for how long it has been in its present action: infinity if it is silent.
    Where ranks wait for one another it is the last to have begun with it: one that ends a run has
    not heard yet that all others do.
    """
    now = monotonic()
    passed: list[int] = []
    while True:
        following = _of_all(beats, me, patience) if peer is None else peer
        if passed and following in (me, *passed):
            busy = min(beats[r].busy + now - beats[r].heard for r in passed)
            culprit = following if peer is None else passed[-1]
            return _circle(beats[culprit], culprit, [me, *passed, following]), busy
        beat = beats[following]
        silent = now - beat.heard
        if silent > patience:
            return Cause(following, f"{beat}: no sign of life for {silent:.1f} s"), inf
        if beat.waits is None:
            busy = beat.busy + silent
            return Cause(following, f"{beat.doing}: busy with it for {busy:.1f} s"), busy
        passed.append(following)
        peer = beat.waits[0]


def _circle(beat: Beat, culprit: int, ranks: list[int]) -> Cause:
    assert beat.waits is not None
    circle = " -> ".join(map(str, ranks))
    return Cause(
        culprit, f"{beat.doing}: waits on {beat.waits[1]}; ranks wait in a circle, {circle}"
    )


def _of_all(beats: Sequence[Beat], me: int, patience: float) -> int:
    """Who keeps all waiting: a silent rank, else one that waits for nobody, else not for all."""
    rank, silent = most_silent(beats, me)
    if silent > patience:
        return rank

    def free(r: int) -> int:
        waits = beats[r].waits
        return 0 if waits is None else 1 if waits[0] is not None else 2

    return min((r for r in range(len(beats)) if r != me), key=free)
