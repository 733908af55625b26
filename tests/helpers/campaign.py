"""Counts random faults in a file, over several pytest sessions."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

FAULT = "fault"  # the property that a test records: campaign, seed, fault
_Row = tuple[int, str, str, float]  # seed, fault, outcome, seconds


class Campaign:
    """A plugin of the process that collects the reports.

    A repeated seed replaces its earlier result. The file is written after every fault, so that a
    killed session keeps its results.

    Args:
        path: a JSON file; its present content is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[int, _Row]] = {}
        if path.exists():
            for name, entry in json.loads(path.read_text())["campaigns"].items():
                self._known[name] = {row[0]: tuple(row) for row in entry["seeds"]}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome != "failed":
            return
        for name, value in report.user_properties:
            if name == FAULT:
                campaign, seed, fault = value
                row = (seed, fault, report.outcome, round(report.duration, 1))
                self._known.setdefault(campaign, {})[seed] = row
                self._write()

    def _write(self) -> None:
        outcomes = Counter(row[2] for rows in self._known.values() for row in rows.values())
        document: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "faults": outcomes.total(),
            "outcomes": outcomes,
            "campaigns": {},
        }
        for name, rows in sorted(self._known.items()):
            counts = Counter(f"{fault}: {outcome}" for _, fault, outcome, _ in rows.values())
            document["campaigns"][name] = {
                "faults": dict(sorted(counts.items())),
                "seeds": [rows[seed] for seed in sorted(rows)],
            }
        partial = self._path.with_suffix(".partial")
        partial.write_text(_lines(document))
        partial.replace(self._path)


def _lines(document: dict[str, Any]) -> str:
    rows: list[str] = []

    def kept(row: _Row) -> str:
        rows.append(json.dumps(row))
        return f"row {len(rows) - 1}"

    for entry in document["campaigns"].values():
        entry["seeds"] = [kept(row) for row in entry["seeds"]]
    text = json.dumps(document, indent=1)
    for n, row in enumerate(rows):
        text = text.replace(f'"row {n}"', row, 1)
    return text + "\n"
