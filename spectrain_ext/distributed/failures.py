"""Describes ranks by heartbeats, and finds which rank a wait is stuck on."""

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
from traceback import walk_tb
from typing import Any, NamedTuple

_NOBODYS = "no rank of this version has written: "


def _decoded(text: bytes) -> Any:
    """Return the JSON value, or None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Cause(NamedTuple):
    """The rank that failed first, and why."""

    rank: int
    reason: str
    found: int | None = None  # the rank that found it; None: each by itself, without the store
    report: str = ""  # "host:path" of the file that the finder writes
    gone: bool = False  # its connections have broken, so it sends no more heartbeats

    @staticmethod
    def read(text: bytes, ranks: int) -> Cause | None:
        """Return the cause in an entry of the store; a damaged entry is a cause, too."""
        match _decoded(text):
            case [int(rank), str(reason), int() | None as found, str(report), bool(gone)] if (
                0 <= rank < ranks and (found is None or 0 <= found < ranks)
            ):
                return Cause(rank, reason, found, report, gone)
        return Cause(0, f"the store has a failure that {_NOBODYS}{text!r:.200}") if text else None


class Heartbeat(NamedTuple):
    """A rank's last heartbeat."""

    text: bytes  # as received
    heard: float  # when it was received, on this rank's clock
    doing: str = "starting"
    busy: float = 0.0  # seconds since it began that
    waits: tuple[int | None, str] | None = None  # for which rank (None: all), on which edge
    words: int = 0  # number of values it has shared, see ``Board.exchange_json``
    last: Sequence[Any] = ()  # the last two of them
    complete: int = 0  # number of values that all ranks have shared, to its knowledge
    knows: bool = False  # of a failure, and has posted its part of the report
    reported: bool = False  # the report is written, to its knowledge
    process: Sequence[Any] = ()  # see ``this_process``

    @staticmethod
    def read(text: bytes, heard: float, ranks: int) -> Heartbeat:
        """Return the heartbeat in an entry of the store; ValueError if the entry is damaged."""
        match _decoded(text):
            case {
                "doing": str(),
                "busy": float(),
                "waits": None | [int() | None, str()] as waits,
                "words": int(),
                "last": list(),
                "complete": int(),
                "knows": bool(),
                "reported": bool(),
                "process": [str(), int(), int()],
            } as said if len(said) == 9 and (not waits or 0 <= (waits[0] or 0) < ranks):
                return Heartbeat(text, heard, **{**said, "waits": waits and tuple(waits)})
        raise ValueError(f"the store has a heartbeat of it that {_NOBODYS}{text!r:.200}")

    @property
    def news(self) -> tuple[int, int, bool]:
        """The fields that other ranks wait for."""
        return self.words, self.complete, self.knows

    def __str__(self) -> str:
        return f"last known in {self.doing}"


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def is_broken_connection(error: BaseException) -> bool:
    """Whether torch raised this error for a connection, instead of other code during the call.

    A signal handler raises inside the call, too: a DataLoader's, when one of its workers is killed.
    """
    kind = type(error)
    if kind is not RuntimeError and kind.__module__ != "torch.distributed":
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return modules != [] and modules[-1].startswith(("torch.distributed.", f"{__package__}."))


def this_process() -> list[Any]:
    """Return the machine's name, the parent's process id and this process's id."""
    return [socket.gethostname(), os.getppid(), os.getpid()]


def wake_stopped(process: Sequence[Any]) -> None:
    """Continue a process that was stopped (SIGSTOP) on this machine, so that it ends too.

    Only if the same launcher started it. A stopped process does not receive torchrun's SIGTERM, and
    SIGKILL follows only after 30 s, whatever ``--shutdown-timeout`` is (torch 2.13).
    """
    host, launcher, _ = this_process()
    if list(process[:2]) != [host, launcher]:
        return
    with suppress(OSError):  # the process has ended, or the system has no /proc
        about = Path(f"/proc/{process[2]}/stat").read_text().rpartition(")")[2].split()
        if about[:2] == ["T", str(launcher)]:
            os.kill(process[2], signal.SIGCONT)


def most_silent(beats: Sequence[Heartbeat], me: int) -> tuple[int, float]:
    """Return the other rank with the oldest heartbeat, and its age in seconds."""
    rank = min((r for r in range(len(beats)) if r != me), key=lambda r: beats[r].heard)
    return rank, monotonic() - beats[rank].heard


def find_culprit(
    beats: Sequence[Heartbeat], me: int, peer: int | None, patience: float
) -> tuple[Cause, float]:
    """Follow the chain of waits to a rank that is silent or does not wait.

    Returns that rank as a cause, and the seconds it has spent in its present action (infinity if it
    is silent). If ranks wait in a circle, the seconds are those of the wait that began last, since
    a rank that ends a run may not know yet that all others have.
    """
    now = monotonic()
    passed: list[int] = []
    while True:
        following = _rank_all_wait_for(beats, me, patience) if peer is None else peer
        if passed and following in (me, *passed):
            busy = min(beats[r].busy + now - beats[r].heard for r in passed)
            culprit = following if peer is None else passed[-1]
            return _circle_cause(beats[culprit], culprit, [me, *passed, following]), busy
        beat = beats[following]
        silent = now - beat.heard
        if silent > patience:
            return Cause(following, f"{beat}: no sign of life for {silent:.1f} s"), inf
        if beat.waits is None:
            busy = beat.busy + silent
            return Cause(following, f"{beat.doing}: busy with it for {busy:.1f} s"), busy
        passed.append(following)
        peer = beat.waits[0]


def _circle_cause(beat: Heartbeat, culprit: int, ranks: list[int]) -> Cause:
    assert beat.waits is not None
    circle = " -> ".join(map(str, ranks))
    return Cause(
        culprit, f"{beat.doing}: waits on {beat.waits[1]}; ranks wait in a circle, {circle}"
    )


def _rank_all_wait_for(beats: Sequence[Heartbeat], me: int, patience: float) -> int:
    """Return the rank that all wait for: a silent one, else one that waits for the fewest."""
    rank, silent = most_silent(beats, me)
    if silent > patience:
        return rank

    def free(r: int) -> int:
        waits = beats[r].waits
        return 0 if waits is None else 1 if waits[0] is not None else 2

    return min((r for r in range(len(beats)) if r != me), key=free)
