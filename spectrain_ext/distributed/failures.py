"""Finds which rank a wait is stuck on, and writes one text file about all ranks of a failure."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

#: Instructions that a rank remembers, and characters of its stacks.
LAST = 32
STACK_CHARACTERS = 2**15

#: Names of the threads that watch, which reports leave out.
WATCHING = ("spectrain board", "spectrain guard")


class Cause(NamedTuple):
    """The rank that failed first, and why."""

    rank: int
    reason: str
    found: int | None = None  # the rank that found it; None: each by itself, without the store
    report: str = ""  # "host:path" of the file that the finder writes
    gone: bool = False  # its connections have broken, so it sends no more heartbeats


class Heartbeat(NamedTuple):
    """A rank's last heartbeat; all after ``heard`` is sent, as a JSON list."""

    text: bytes  # as received
    heard: float  # when it was received, on this rank's clock
    doing: str = "starting"
    busy: float = 0.0  # seconds since it began that
    waits: Sequence[Any] | None = None  # for which rank (None: all), and on which edge
    shared: int = 0  # number of values it has shared, see ``Board.exchange_json``
    last: Sequence[Any] = ()  # the last two of them
    knows: bool = False  # of a failure, and has posted its state for the report
    reported: bool = False  # the report is written, to its knowledge
    process: Sequence[Any] = ()  # see ``this_process``

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
    modules = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
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
            circle, beat = " -> ".join(map(str, [me, *passed, following])), beats[culprit]
            assert beat.waits is not None
            reason = f"waits on {beat.waits[1]}; ranks wait in a circle, {circle}"
            return Cause(culprit, f"{beat.doing}: {reason}"), busy
        beat = beats[following]
        silent = now - beat.heard
        if silent > patience:
            return Cause(following, f"{beat}: no sign of life for {silent:.1f} s"), inf
        if beat.waits is None:
            busy = beat.busy + silent
            return Cause(following, f"{beat.doing}: busy with it for {busy:.1f} s"), busy
        passed.append(following)
        peer = beat.waits[0]


def _rank_all_wait_for(beats: Sequence[Heartbeat], me: int, patience: float) -> int:
    """Return the rank that all wait for: a silent one, else one that waits for the fewest."""
    rank, silent = most_silent(beats, me)
    if silent > patience:
        return rank

    def free(r: int) -> int:
        waits = beats[r].waits
        return 0 if waits is None else 1 if waits[0] is not None else 2

    return min((r for r in range(len(beats)) if r != me), key=free)


# The report


class Report:
    """One rank's part in the report of a failure.

    Each rank posts its state to the store, and the rank that found the cause writes the file. Where
    the store does not answer, every rank writes a file of its own.
    """

    def __init__(
        self, store: Store, rank: int, cause: Cause, state: str, beats: Sequence[Heartbeat]
    ) -> None:
        self._store, self._rank, self._state, self._posted = store, rank, state, False
        self._states = {rank: state}
        self.reported = self.ended = cause.found is None
        self.cause = cause._replace(report=new_report()) if self.ended else cause
        if self.ended:
            self._write(beats)

    def post(self) -> None:
        if not self._posted:
            self._store.set(f"state/{self._rank}", self._state)
            self._posted = True

    def advance(self, beats: Sequence[Heartbeat], patience: float, late: bool) -> None:
        """Write the states that have arrived, or note that the report is complete."""
        if self.ended:
            return
        cause = self.cause
        if cause.found == self._rank:
            new = [r for r, beat in enumerate(beats) if beat.knows and r not in self._states]
            for r in new:
                self._states[r] = self._store.get(f"state/{r}").decode(errors="replace")
            awaited = any(
                beat.text and monotonic() - beat.heard < patience
                for r, beat in enumerate(beats)
                if r not in self._states and not (cause.gone and r == cause.rank)
            )
            self.reported = late or not awaited
            if new or self.reported:
                self._write(beats)
        elif cause.found is not None:
            self.reported = late or beats[cause.found].reported
        # Rank 0 may host the store, so it leaves last.
        stays = any(beat.knows and not beat.reported for beat in beats[1:]) and self._rank == 0
        self.ended = late or (self.reported and not stays)

    def _write(self, beats: Sequence[Heartbeat]) -> None:
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        lines = [
            f"A pipeline over {len(beats)} processes has failed.",
            f"First cause: rank {self.cause.rank}, {self.cause.reason}",
            f"Written by rank {self._rank} at {when}; each rank speaks of when it learnt of the "
            "failure.",
            "\nRanks: what they do",
        ]
        sections = []
        for r, beat in enumerate(beats):
            does = "has not been heard of"
            if r in self._states:
                does, _, more = self._states[r].partition("\n")
                sections.append(f"\n{'=' * 30} rank {r}: {more}")
            elif beat.text:
                ago = monotonic() - beat.heard
                does = f"does not answer; {ago:.3f} s ago it said: {beat.doing}"
            lines.append(f"  {r}  {does}")
        with suppress(OSError):  # the report must not hide the cause
            Path(place_of(self.cause.report)).write_text(
                "\n".join([*lines, *sections, ""]), "utf-8", errors="replace"
            )


def new_report() -> str:
    """Make an empty file that only this user can read; return "host:path", or "" on failure."""
    try:
        handle, path = tempfile.mkstemp(".txt", "spectrain-failure-")
        os.close(handle)
    except OSError:
        return ""
    return f"{socket.gethostname()}:{path}"


def place_of(report: str) -> str:
    """Return the report's path, without the machine's name if it is this one."""
    return report.removeprefix(f"{socket.gethostname()}:")


def drop_report(report: str) -> None:
    if report:
        with suppress(OSError):
            os.unlink(place_of(report))


def state_of(
    steps: Sequence[tuple[tuple[object, ...], float]],
    waits: tuple[int | None, str, float] | None,
    error: str,
) -> str:
    """Return what this rank does, in a line, and then the text of its section of the report."""
    now = monotonic()
    does = f"{_words(steps[-1][0])}, for {now - steps[-1][1]:.3f} s"
    if waits is not None:
        does += f"; waits for {waits[1]}, for {now - waits[2]:.3f} s"
    lines = [does, f"host {socket.gethostname()}, process {os.getpid()}"]
    lines.append("\nlast instructions, and how long ago they began")
    lines += [f"{now - began:10.3f} s  {_words(what)}" for what, began in steps]
    if error:
        lines.append(f"\nits exception\n{error[-STACK_CHARACTERS:]}")
    lines.append(f"\nPython stacks\n{_stacks()[:STACK_CHARACTERS]}")
    return "\n".join(lines)


def _words(what: tuple[object, ...]) -> str:
    return " ".join(map(str, what))


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda each: each[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame, 64))}"
        for ident, frame in frames
        if names.get(ident) not in WATCHING
    )
