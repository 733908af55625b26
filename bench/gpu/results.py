"""Maintains the folder of results: few files of bounded size, at most two seconds old."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cases import write
from .report import markdown, operators_json
from .steps import Outcome, Step

#: Maximum size of a file in the folder.
LARGEST = 15 * 2**20
_LOG_HEAD, _LOG_TAIL = 100_000, 500_000
#: All files at the end.
FILES = ("summary.md", "summary.json", "parts.json", "operators.json", "logs.txt", "traces.tar")


class Results:
    """Gathers what the parts write in `work` into the files of `out`."""

    def __init__(self, out: Path, work: Path, environment: dict[str, Any], dry: bool) -> None:
        self.out, self.work = out, work
        self.environment, self.dry = environment, dry
        self.steps: list[Step] = []
        self.outcomes: list[Outcome] = []

    def log_of(self, step: Step) -> Path:
        """Return the file of a step's output."""
        return self.work / f"{step.name}.log"

    def parts(self) -> dict[str, dict[str, Any]]:
        """Return every part's results so far, by name."""
        found = {}
        for path in sorted(self.work.glob("*.json")):
            try:
                found[path.stem] = json.loads(path.read_text())
            # the file is being replaced, or is a trace of something else
            except (OSError, ValueError):
                continue
        return found

    def publish(self) -> None:
        """Write everything except the summary."""
        parts = self.parts()
        operators = parts.pop("operators", None)
        if operators is not None:
            text = operators_json(operators)
            if text is not None:
                write(self.out / "operators.json", text)
            cases = {k: {**v, "result": None} for k, v in operators.items()}
            parts["operators"] = cases
        if parts:
            write(self.out / "parts.json", json.dumps(parts, indent=1))
        self._logs()
        traces = self.work / "traces.tar"
        if traces.exists() and traces.stat().st_size <= LARGEST:
            shutil.copy(traces, self.out / traces.name)

    def _logs(self) -> None:
        """Return all logs in sequence; long ones lose their middle."""
        text = ""
        order = {step.name: k for k, step in enumerate(self.steps)}
        logs = self.work.glob("*.log")
        for path in sorted(logs, key=lambda p: (order.get(p.stem, len(order)), p.name)):
            said = path.read_text(errors="replace")
            if len(said) > _LOG_HEAD + _LOG_TAIL:
                left_out = len(said) - _LOG_HEAD - _LOG_TAIL
                head, tail = said[:_LOG_HEAD], said[-_LOG_TAIL:]
                said = f"{head}\n[{left_out} characters left out]\n{tail}"
            text += f"\n{'=' * 20} {path.stem} {'=' * 20}\n{said}"
        if text:
            write(self.out / "logs.txt", text.encode()[:LARGEST])

    def summarize(self) -> str:
        """Write everything, including the summary."""
        self.publish()
        done = {o.name: o for o in self.outcomes}
        outcomes = [done.get(s.name, Outcome(s.name, "not run")) for s in self.steps]
        steps = [{**asdict(s), **asdict(o)} for s, o in zip(self.steps, outcomes, strict=True)]
        summary = {"environment": self.environment, "dry_run": self.dry, "steps": steps}
        write(self.out / "summary.json", json.dumps(summary, indent=1))
        text = markdown(self.environment, outcomes, self.parts())
        write(self.out / "summary.md", text)
        return text


def clean(outcomes: Sequence[Outcome]) -> bool:
    """Return whether all steps ran without errors; tools and GPUs may be missing."""
    tools = ("memcheck", "synccheck", "racecheck", "initcheck")
    found = any(o.facts.get(k) for o in outcomes for k in ("sanitizer_errors", "hazards"))
    return not found and all(o.status in ("ok", "skipped") for o in outcomes if o.name not in tools)
