"""Runs the suite's steps, commands with a time limit, some of them side by side."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import POISONED

_RESTARTS = 4
#: Seconds before its limit at which a part stops by itself.
_MARGIN_S = 4.0


@dataclass
class Step:
    """A command; "{until}" in it becomes the time at which it should have ended."""

    name: str
    command: list[str]
    limit_s: float
    needs: str | None = None  # a program that the step requires
    gpus: int = 1  # GPUs that the step requires
    essential: bool = False  # the other steps depend on it
    patience_s: float = 0.0  # additional time, at the expense of the last steps


@dataclass
class Outcome:
    """The result of a step."""

    name: str
    status: str  # "ok", "failed", "timed out", "missing", "skipped", "not run"
    seconds: float = 0.0
    code: int | None = None
    detail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


#: Runs a command in this process, as a rehearsal does; None: the command is not one of these.
Inside = Callable[[list[str], Path], int | None]


class Running:
    """A running step, in its own session, so that all of it can be ended."""

    def __init__(
        self, step: Step, log: Path, cwd: Path, ends: float, inside: Inside | None
    ) -> None:
        self.step = step
        self._log, self._cwd, self._ends, self._inside = log, cwd, ends, inside
        self.outcome: Outcome | None = None
        self._begun, self._restarts = time.monotonic(), 0
        self._child: subprocess.Popen[bytes] | None = None
        if step.needs and shutil.which(step.needs) is None:
            self.outcome = Outcome(step.name, "missing", detail=f"{step.needs} is not on PATH")
        elif ends - time.monotonic() < 1:
            self.outcome = Outcome(step.name, "not run", detail="no time left")
        else:
            self._start()

    def _start(self) -> None:
        until = time.time() + max(0.0, self._ends - time.monotonic() - _MARGIN_S)
        command = [word.replace("{until}", f"{until:.1f}") for word in self.step.command]
        with open(self._log, "a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            self._mark = log.tell()
            if self._inside is not None:
                code = self._inside(command, self._log)
                if code is not None:
                    self._done(code)
                    return
            self._child = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._cwd,
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Return whether the step has ended; restart it once if it lost its device."""
        if self.outcome is not None:
            return True
        assert self._child is not None
        code = self._child.poll()
        if code is None:
            if time.monotonic() < self._ends:
                return False
            self.end()
        self._done(code)
        return self.outcome is not None

    def end(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._end_session()
            self._child.wait()

    def _end_session(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(self._child.pid, signal.SIGKILL)

    def _done(self, code: int | None) -> None:
        text = self._log.read_text(errors="replace")[self._mark :]
        facts = read(text)
        left = self._ends - time.monotonic()
        lost = code is not None and (code == POISONED or code < 0)
        if lost and self._restarts < _RESTARTS and left > 10:
            self._restarts += 1
            self._end_session()
            self._start()
            return
        if self._restarts:
            facts["restarts"] = self._restarts
        status = "timed out" if code is None else "ok" if code == 0 else "failed"
        detail = "\n".join(text.splitlines()[-5:])[-1000:]
        seconds = time.monotonic() - self._begun
        self.outcome = Outcome(self.step.name, status, seconds, code, detail, facts)


def run_group(
    group: Sequence[Step],
    log_of: Callable[[Step], Path],
    cwd: Path,
    ends: float,
    publish: Callable[[], None],
    inside: Inside | None = None,
) -> list[Outcome]:
    """Run steps side by side until all have ended, or until `time.monotonic()` is `ends`."""
    running: list[Running] = []
    try:
        for step in group:
            running.append(Running(step, log_of(step), cwd, ends, inside))
        published = time.monotonic()
        # Poll every step, so that none exceeds its limit.
        while not all([r.poll() for r in running]):
            time.sleep(0.05)
            if time.monotonic() - published > 2:
                publish()
                published = time.monotonic()
    finally:
        for r in running:
            r.end()
    return [r.outcome for r in running if r.outcome is not None]


def read(text: str) -> dict[str, Any]:
    """Return the figures in a sanitizer's last lines."""
    facts: dict[str, Any] = {}
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    if summary:
        facts["sanitizer_errors"] = int(summary[-1])
    hazards = re.findall(r"RACECHECK SUMMARY: (\d+) hazard", text)
    if hazards:
        facts["hazards"] = int(hazards[-1])
    return facts
