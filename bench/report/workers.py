"""Asynchronous data parallelism: test accuracy by the number of workers, simulated."""

from __future__ import annotations

import json
from pathlib import Path

from table import table

from .accuracy import ended

FILE = "2026-11-22-workers/digits.json"


def section(results: Path) -> str:
    """Means, and half of their 95 % intervals, by rule and number of workers."""
    rows = json.loads((results / FILE).read_text())["rows"]
    workers = sorted({row["workers"] for row in rows})
    found: dict[str, dict[int, str]] = {}
    for row in rows:
        ends = [None if end is None else end["accuracy"] for end in row["ends"]]
        found.setdefault(row["rule"], {})[row["workers"]] = ended(ends, 2)
    heads = [f">{n} worker{'s' * (n > 1)}" for n in workers]
    lines = [[f"`{rule}`", *(of.get(n, "") for n in workers)] for rule, of in found.items()]
    return table("|".join(["rule", *heads]), lines)
