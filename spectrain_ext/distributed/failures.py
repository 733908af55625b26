"""Finds which rank a wait is stuck on, and writes a report of a failure."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4

from spectrain_ext import _C
from spectrain_ext.errors import StageError

#: Instructions that a rank remembers, and characters of its stacks.
LAST = 32
STACK_CHARACTERS = 2**15

#: Names of the threads that watch, which reports leave out.
WATCHING = ("spectrain board", "spectrain guard")


#: What a rank waits for inside its stage.
SHARES = "a rank that computes the stage with it"
# Files whose functions wait for collectives: a stage's, and those of the caller's loop too.
_COLLECTIVES = (
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/distributed_c10d.py",
)


class Cause(NamedTuple):
    """The rank that failed first, and why."""

    rank: int
    reason: str
    report: str = ""  # the random part of the report's name
    gone: bool = False  # its connections have broken, so it sends no more heartbeats


class Heartbeat(NamedTuple):
    """A rank's last heartbeat; all after ``heard`` is sent, as a JSON list."""

    text: bytes  # as received
    heard: float  # when it was received, on this rank's clock
    doing: str = "starting"
    busy: float = 0.0  # seconds since it began that
    waits: Sequence[Any] | None = None  # for which rank (or several; None: all), and on which edge
    shared: int = 0  # number of values it has shared, see ``Board.exchange_json``
    last: Sequence[Any] = ()  # the last three of them
    knows: bool = False  # of a failure
    process: Sequence[Any] = ()  # see ``this_process``
    left: Sequence[Any] | None = None  # the caller's loop: see ``Board.leave``
    call: str = ""  # of the pipeline, that the ranks make together

    def __str__(self) -> str:
        return f"last known in {self.doing}"


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


def is_broken_inside(error: BaseException) -> bool:
    """Whether a stage failed because a collective of its own, as of tensor parallelism, broke."""
    cause = error.__cause__ if isinstance(error, StageError) else None
    # Its text tells: from autograd, the last frame is that of the backward.
    broken = "/gloo/" in str(cause) or "caused pair closure" in str(cause)
    return cause is not None and (broken or type(cause).__module__ == "torch.distributed")


#: For whom a rank waits (None: all), for what, and since when.
Waits = tuple[int | Sequence[int] | None, str, float]


class Sharing:
    """Finds out how long this rank waits inside its stages, for others that compute them with it.

    No caller announces these waits: they are in collectives of modules, as of tensor parallelism.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,  # None: any
        collectives: Callable[[], int] = lambda: 0,  # counts those that have begun
    ) -> None:
        self._ranks, self._files = ranks, _COLLECTIVES[: 1 if ranks is None else 2]
        self._collectives: Callable[[], int] = lambda: 0
        with suppress(RuntimeError):  # not every backend counts them
            collectives()
            self._collectives = collectives
        self._seen: tuple[object, float] | None = None  # a collective, and when it was first seen

    def waits(self, began: float) -> Waits | None:
        """Return the wait, if there is one; ``began``: when this rank began what it
        does now."""
        calls = _C.stacks().get(threading.main_thread().ident or 0, ())
        if not any(file.endswith(self._files) for file, *_ in calls):
            self._seen = None
            return None
        mark, now = (self._collectives(), began), monotonic()
        seen = self._seen
        if seen is None or seen[0] != mark:
            self._seen = seen = mark, now
        return self._ranks, SHARES, seen[1]


def this_process() -> list[Any]:
    """Return the machine's name, the parent's process id and this process's id."""
    return [socket.gethostname(), os.getppid(), os.getpid()]


def wake_stopped(process: Sequence[Any]) -> None:
    """Continue a process that was stopped (SIGSTOP) on this machine, so that it ends too.

    Only if the same launcher started it. A stopped process does not receive torchrun's SIGTERM, and
    SIGKILL follows only after 30 s, whatever ``--shutdown-timeout`` is (torch 2.13).
    """
    if list(process[:2]) == this_process()[:2]:
        with suppress(OSError):  # the process has ended
            os.kill(process[2], signal.SIGCONT)


def find_culprit(
    beats: Sequence[Heartbeat], me: int, peer: int | Sequence[int] | None, patience: float
) -> tuple[Cause, float]:
    """Follow the chain of waits to a rank that is silent or does not wait.

    If ranks make different calls, it is the one whose call most others do not make.

    Returns that rank as a cause, and the seconds it has spent on what it does now (infinity if it
    is silent). If ranks wait in a circle, the seconds are those of the wait that began last, since
    a rank that ends a run may not know yet that all others have.
    """
    now = monotonic()
    if (cause := _other_call(beats, me)) is not None:
        return cause, inf
    passed: list[int] = []
    while True:
        among = [r for r in range(len(beats)) if r != me] if peer is None else peer
        following = among if isinstance(among, int) else _awaited(beats, among, patience)
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


def _other_call(beats: Sequence[Heartbeat], me: int) -> Cause | None:
    """Find a rank that has left out a call, or made another one."""
    calls = {r: b.call for r, b in enumerate(beats) if b.call and b.shared == beats[me].shared}
    most = Counter(calls.values()).most_common(1)  # of as many, that of the first rank
    for rank, call in calls.items():
        if call != most[0][0]:
            made = f"{beats[rank].doing}, in {call!r}, while other ranks are in {most[0][0]!r}"
            return Cause(rank, f"{made}: every rank makes the same calls in the same order")
    return None


def _awaited(beats: Sequence[Heartbeat], among: Sequence[int], patience: float) -> int:
    """Return the rank that others wait for: a silent one, else one that waits for the fewest."""

    def order(r: int) -> tuple[float, int]:
        silent, waits = monotonic() - beats[r].heard, beats[r].waits
        return -max(silent, patience), 0 if waits is None else 1 if waits[0] is not None else 2

    return min(among, key=order)


# The report


def write_report(
    cause: Cause,
    rank: int,
    beats: Sequence[Heartbeat],
    steps: Iterable[tuple[tuple[object, ...], float]],
    error: str,
) -> str:
    """Append what this rank knows to its machine's file; return the file's path, "" on failure."""
    now, when = monotonic(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    where = f"process {os.getpid()} on {socket.gethostname()}, {when}"
    lines = [f"{'=' * 30} rank {rank} of {len(beats)}: {where}"]
    lines += [f"First cause: rank {cause.rank}, {cause.reason}", "\nRanks: what they do"]
    for r, beat in enumerate(beats):
        silent = now - beat.heard
        row = f"  {r}  {beat.doing}, for {beat.busy + silent:.3f} s"
        if beat.waits is not None:
            row += f"; waits for {beat.waits[1]}"
        if r != rank:
            row += f"; heard {silent:.3f} s ago" if beat.text else "; not heard of yet"
        lines.append(row)
    lines.append("\nlast instructions, and how long ago they began")
    lines += [f"{now - began:10.3f} s  {' '.join(map(str, step))}" for step, began in steps]
    if error:
        lines.append(f"\nits exception\n{error[-STACK_CHARACTERS:]}")
    lines.append(f"\nPython stacks\n{_stacks()[:STACK_CHARACTERS]}\n\n")
    name = cause.report if cause.report.isalnum() else uuid4().hex  # may be anybody's entry
    try:
        path = os.path.join(tempfile.gettempdir(), f"spectrain-failure-{name}.txt")
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "ab", buffering=0) as file:  # at once: other ranks append, too
            file.write("\n".join(lines).encode(errors="replace"))
    except OSError:
        return ""
    return path


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = sorted(_C.stacks().items(), key=lambda each: each[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{_written(calls)}"
        for ident, calls in stacks
        if names.get(ident) not in WATCHING
    )


def _written(calls: Sequence[tuple[str, int, str]]) -> str:
    frames = ((file, line, function, None) for file, line, function in reversed(calls[:64]))
    return "".join(traceback.StackSummary.from_list(frames).format())
