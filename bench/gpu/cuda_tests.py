"""Runs the tests marked cuda, one process per file, so that a lost device affects one file only."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine
from .cases import Cases
from .scale import Scale

_AT_ONCE = 6
#: Seconds of one test; the first one of a process creates a context and loads kernels.
_TEST_S = 100


def run_tests(cases: Cases, scale: Scale, tests: Path, out: Path) -> None:
    """Run a case per file, on the GPUs in turn; its log is `tests-NAME.log`."""
    waiting, gpus = marked(tests)[: scale.few], itertools.cycle(_visible())
    if not waiting:
        cases.put("tests", "failed", error=f"no file of {tests.name} has a test marked cuda")
    running: list[_File] = []
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            if cases.left_s > 0:
                running.append(_File(waiting.pop(0), tests, out, next(gpus)))
                cases.put(running[-1].name, "running")
            else:
                cases.put(str(waiting.pop(0).relative_to(tests)), "no time left")
        time.sleep(0.05)
        for file in list(running):
            code = file.child.poll()
            if code is None and cases.left_s < 0:
                file.child.kill()
                code = file.child.wait()
                file.ended = True
            if code is not None:
                running.remove(file)
                cases.put(file.name, **file.outcome(code))


def marked(tests: Path) -> list[Path]:
    """Return the files with tests marked cuda, those about CUDA first."""
    files = [p for p in sorted(tests.rglob("test_*.py")) if "mark.cuda" in p.read_text()]
    return sorted(files, key=lambda p: ("cuda" not in p.name, str(p)))


def _visible() -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES with each GPU first in turn; only None without several GPUs."""
    count = machine.gpus()
    if count < 2:
        return [None]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",")[:count] if given else [str(k) for k in range(count)]
    # The other GPUs remain visible: some tests need two.
    return [",".join(names[k:] + names[:k]) for k in range(count)]


@dataclass
class _File:
    path: Path
    tests: Path
    out: Path
    gpus: str | None = None  # for CUDA_VISIBLE_DEVICES; None: unchanged
    ended: bool = False

    def __post_init__(self) -> None:
        self.start = time.time()
        self.name = str(self.path.relative_to(self.tests))
        self.log = self.out / f"tests-{self.name.removesuffix('.py').replace('/', '-')}.log"
        # Strict options would fail on a missing plugin.
        command = [sys.executable, "-m", "pytest", str(self.path), "-v", "--tb=short"]
        command += ["-o", "addopts=-ra --import-mode=importlib", "-m", "cuda and not nightly"]
        command += ["--continue-on-collection-errors", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("pytest_timeout") is not None:
            command += ["--timeout", str(_TEST_S)]
        own = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        with open(self.log, "w") as log:
            self.child = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.tests,
                env={"OMP_NUM_THREADS": "2", **os.environ, **own},
            )

    def outcome(self, code: int) -> dict[str, Any]:
        """Return the result; pytest's status 5 means that no test was left to run."""
        text = self.log.read_text(errors="replace")
        status = "no time left" if self.ended else "ok" if code in (0, 5) else "failed"
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*)$", text, re.MULTILINE)
        found = {"code": code, "seconds": round(time.time() - self.start, 1), **counts(text)}
        # The process ended in its last test.
        begun = re.findall(r"^(\S+::\S+)", text, re.MULTILINE)
        if code < 0 and begun:
            found["last"] = begun[-1]
        return {"status": status, "result": found, "failed": [f[:300] for f in failed[:40]]}


def counts(text: str) -> dict[str, int]:
    """Return the numbers of passed, failed and other tests, from pytest's output so far."""
    found: dict[str, int] = {}
    last = re.findall(r"^=+ (.*) in [\d.]+s.*=+$", text, re.MULTILINE)
    for word in ("passed", "failed", "skipped", "error", "deselected"):
        if last:
            number = re.search(rf"(\d+) {word}", last[-1])
            if number:
                found[word] = int(number[1])
        else:
            lines = re.findall(rf"^\S+::.* {word.upper()}\b", text, re.MULTILINE)
            if lines:
                found[word] = len(lines)
    return found
