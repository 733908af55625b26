"""Writes one text file about all ranks when one has failed."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from torch.distributed.distributed_c10d import Store

from .failures import Cause, Heartbeat

#: Instructions that a rank remembers, and characters of its stacks.
LAST = 32
STACK_CHARACTERS = 2**15

#: Names of the threads that watch, which reports leave out.
WATCHING = ("spectrain board", "spectrain guard")

#: Returns the message counts of each edge that begins or ends at this rank.
Messages = Callable[[], Sequence[tuple[str, Mapping[str, int]]]]


class Report:
    """One rank's part of a failure report.

    Each rank posts its part to the store, and the rank that found the cause writes the file. Where
    the store does not answer, every rank writes a file of its own.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self.reported = self.ended = True  # until a report begins
        self._own = ""
        self._posted, self._until = False, 0.0
        self._parts: dict[int, str | bytes] = {}
        self._written = 0  # number of parts in the file

    def begin(self, cause: Cause, own: str, beats: Sequence[Heartbeat], until: float) -> Cause:
        """Begin a report of this cause; return the cause, with a path where it had none."""
        self._own, self._parts, self._until = own, {self._rank: own}, until
        self.reported = self.ended = cause.found is None
        if self.ended:
            cause = cause._replace(report=new_report())
            _write(self._rank, cause, self._parts, beats)
        return cause

    def post(self, own: Callable[[], str]) -> None:
        """Post this rank's part once: the one made when the cause became known, if there is one."""
        if not self._posted:
            self._store.set(_key(self._rank), self._own or own())
            self._posted = True

    def advance(self, cause: Cause, beats: Sequence[Heartbeat], patience: float) -> None:
        """Write the parts that have arrived, or note that the report is complete."""
        if self.ended:
            return
        late = monotonic() > self._until
        if cause.found == self._rank:
            self._collect(cause, beats, patience, late)
        elif cause.found is not None:
            self.reported = late or beats[cause.found].reported
        # Rank 0 may host the store, so it leaves last.
        stays = any(beat.knows and not beat.reported for beat in beats[1:]) and self._rank == 0
        self.ended = late or (self.reported and not stays)

    def _collect(
        self, cause: Cause, beats: Sequence[Heartbeat], patience: float, late: bool
    ) -> None:
        new = [r for r, beat in enumerate(beats) if beat.knows and r not in self._parts]
        if new:
            self._parts |= zip(new, self._store.multi_get([*map(_key, new)]), strict=True)
        awaited = any(
            beat.text and monotonic() - beat.heard < patience
            for r, beat in enumerate(beats)
            if r not in self._parts and not (cause.gone and r == cause.rank)
        )
        self.reported = late or not awaited
        if self.reported or len(self._parts) > self._written:
            self._written = len(self._parts)
            _write(self._rank, cause, self._parts, beats)


def _key(rank: int) -> str:
    return f"part/{rank}"


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


def part_of(
    steps: Sequence[tuple[tuple[object, ...], float]],
    waits: tuple[int | None, str, float] | None,
    messages: Sequence[tuple[str, Mapping[str, int]]],
    collectives: Iterable[tuple[str, float]],
    error: str,
) -> str:
    """Return a rank's state as JSON; times are relative to now."""
    now = monotonic()
    state = f"{_words(steps[-1][0])}, for {now - steps[-1][1]:.3f} s"
    if waits is not None:
        state += f"; waits for {waits[1]}, for {now - waits[2]:.3f} s"
    said = {
        "process": f"host {socket.gethostname()}, process {os.getpid()}",
        "state": state,
        "messages": messages,
        "collectives": [f"{what}, for {now - began:.3f} s" for what, began in collectives],
        "steps": [f"{now - began:10.3f} s  {_words(what)}" for what, began in steps],
        "error": error[-STACK_CHARACTERS:],
        "stacks": _stacks()[:STACK_CHARACTERS],
    }
    return json.dumps(said)


def _words(what: tuple[object, ...]) -> str:
    return " ".join(map(str, what))


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = sorted(sys._current_frames().items(), key=lambda each: each[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame, 64))}"
        for ident, frame in found
        if names.get(ident) not in WATCHING
    )


def _write(
    rank: int, cause: Cause, parts: Mapping[int, str | bytes], beats: Sequence[Heartbeat]
) -> None:
    """Replace the file atomically by what is known now."""
    path = place_of(cause.report)
    if not path:
        return
    with suppress(Exception):  # the report must not hide the cause
        read: dict[int, Any] = {}
        for r, part in sorted(parts.items()):
            with suppress(Exception):  # a damaged part
                said = json.loads(part)
                list(_lines(rank, cause, {r: said}, beats))
                read[r] = said
        text = "\n".join([*_lines(rank, cause, read, beats), ""])
        handle, fresh = tempfile.mkstemp(".partial", "spectrain-failure-", os.path.dirname(path))
        try:
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            os.replace(fresh, path)
        except OSError:
            os.unlink(fresh)


def _lines(
    rank: int, cause: Cause, parts: Mapping[int, Any], beats: Sequence[Heartbeat]
) -> Iterator[str]:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield f"A pipeline over {len(beats)} processes has failed."
    yield f"First cause: rank {cause.rank}, {cause.reason}"
    yield f"Written by rank {rank} at {when}; each rank speaks of when it learnt of the failure."
    yield "\nRanks: what they do"
    for r, beat in enumerate(beats):
        yield f"  {r}  {parts[r]['state'] if r in parts else _last_known(beat)}"
    yield "\nMessages, as the ends of each edge have counted them since it was opened"
    yield from _edges(parts.values()) or ["  none: no run has begun"]
    yield "\nCollectives that have begun and not ended"
    pending = [f"  rank {r}: {each}" for r, part in parts.items() for each in part["collectives"]]
    yield from pending or ["  none"]
    for r, part in parts.items():
        yield f"\n{'=' * 30} rank {r}: {part['process']}"
        yield "\n".join(["\nlast instructions, and how long ago they began", *part["steps"]])
        if part["error"]:
            yield f"\nits exception\n{part['error']}"
        yield f"\nPython stacks\n{part['stacks']}"


def _last_known(beat: Heartbeat) -> str:
    if not beat.text:
        return "has not been heard of"
    return f"does not answer; {monotonic() - beat.heard:.3f} s ago it said: {beat.doing}"


def _edges(parts: Iterable[Any]) -> list[str]:
    ends: dict[str, dict[str, int]] = {}
    found = [each for part in parts for each in part["messages"]]
    for name, counts in sorted(found, key=lambda each: (each[0], "sent" not in each[1])):
        ends.setdefault(name, {}).update(counts)
    lines = []
    for name, counts in ends.items():
        line = ", ".join(f"{what} {count:,}" for what, count in counts.items())
        if {"sent", "used"} <= counts.keys() and counts["sent"] > counts["used"]:
            line += f"; PENDING: {counts['sent'] - counts['used']}"
        lines.append(f"  {name}: {line}")
    return lines
