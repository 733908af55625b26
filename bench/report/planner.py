"""Planned against real runs, and what the planner knows of quality, from the committed frontier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spectrain_ext.method import methods

#: The study that the planner's qualities come from.
STUDY = "2026-11-22-frontier"


def quality_data(results: Path) -> dict[str, Any]:
    """What ``spectrain_ext/planning/quality.json`` holds: gaps and updates of known methods."""
    known = set(methods())
    rows = []
    for path in sorted((results / STUDY).glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row["contender"] not in known or not row["delay"]:
                continue
            rows.append(
                {
                    "workload": path.stem,
                    "method": row["contender"],
                    "stages": row["stages"],
                    "microbatches": row["microbatches"],
                    "delay": row["delay"],
                    "seeds": len(row["losses"]),
                    "gap": _rounded(row["gap"]["mean"]),
                    "updates": _rounded(row["updates"]["0.75"]),
                }
            )
    return {"source": f"bench/results/{STUDY}", "rows": rows}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def quality_text(results: Path) -> str:
    """The file itself, a row a line."""
    data = quality_data(results)
    rows = ",\n  ".join(json.dumps(row) for row in data["rows"])
    return f'{{\n "source": {json.dumps(data["source"])},\n "rows": [\n  {rows}\n ]\n}}\n'
