"""Planned against measured periods; and what the planner knows of the quality of methods."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from table import table

from spectrain_ext.method import methods

from .frontier import DEEP, STUDY, rows_of

#: The runs of bench_plan.py, and those of its option --speeds.
FOLDER = "2026-11-22-plan"
UNEQUAL = "2026-11-25-devices"
_TARGET = 0.1

Row = dict[str, Any]


def section(results: Path) -> str:
    """How far planned periods are from measured ones, by the number of processes."""
    found = {f"{run['processes']} processes": _rows(run) for run in _runs(results, FOLDER)}
    found["2 processes of unequal speeds"] = _rows(_runs(results, UNEQUAL)[0])
    lines = []
    for name, rows in found.items():
        off = sorted(abs(row["ratio"] - 1) for row in rows)
        missed = [row for row in rows if abs(row["ratio"] - 1) > _TARGET]
        lines.append(
            [
                *(name, str(len(rows)), str(len(rows) - len(missed))),
                *(f"{100 * each:.0f} %" for each in (median(off), off[-1])),
                str(sum(row["ratio"] < 1 for row in missed)),
                str(sum(abs(row["work"] - 1) > _TARGET for row in missed)),
            ]
        )
    heads = "|>configurations|>within 10 %|>median error|>largest|>missed: slower than planned"
    return table(f"{heads}|>missed: CPU time off by more than 10 %", lines)


def within(results: Path) -> str:
    """How many configurations of equal ranks are within the target."""
    rows = [row for run in _runs(results, FOLDER) for row in _rows(run)]
    return f"{sum(abs(row['ratio'] - 1) <= _TARGET for row in rows)} of {len(rows)}"


def unequal(results: Path) -> str:
    """Ranks of different speeds: cut for them, and as if they were equal."""
    rows = _rows(_runs(results, UNEQUAL)[0])
    lines = []
    for row in (row for row in rows if row["fitted"]):
        same = ("model", "method", "microbatches")
        alike = next(
            other
            for other in rows
            if not other["fitted"] and all(other[name] == row[name] for name in same)
        )
        gains = [b / a for a, b in zip(row["measured"], alike["measured"], strict=True)]
        lines.append(
            [
                *(f"`{row['method']}`", row["model"], str(row["microbatches"])),
                " + ".join(map(str, row["layers"])),
                *(f"{1e3 * median(row[name]):.1f}" for name in ("planned", "measured")),
                f"{1e3 * median(alike['measured']):.1f}",
                f"{median(gains):.2f}",
            ]
        )
    heads = "method|blocks|>M|layers|>planned ms|>measured ms|>equal cut, measured ms|>gain"
    return table(heads, lines)


def _runs(results: Path, folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((results / folder / "plan.json").read_text())["runs"]
    return found


def _rows(run: dict[str, Any]) -> list[Row]:
    """Return the rows of a run with the medians of planned over measured periods and CPU times."""
    found = []
    for row in run["rows"]:
        ratios = [p / m for p, m in zip(row["planned"], row["measured"], strict=True)]
        work = [p / m for p, m in zip(row["planned_work"], row["measured_work"], strict=True)]
        found.append({**row, "ratio": median(ratios), "work": median(work)})
    return found


def quality_data(results: Path) -> dict[str, Any]:
    """Return what ``spectrain_ext/planning/quality.json`` holds: gaps and updates of methods."""
    known = set(methods())
    rows = []
    later = rows_of(results, "digits", DEEP)  # measured again after ``auto`` changed
    for path in sorted((results / STUDY).glob("*.json")):
        for row in rows_of(results, path.stem):
            if row["contender"] not in known or not row["delay"]:
                continue
            if path.stem == "digits":
                row = next((r for r in later if _same_cell(r, row)), row)
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


def _same_cell(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row[key] == other[key] for key in ("contender", "stages", "microbatches"))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def factors(results: Path) -> str:
    """Minibatches to an equal loss over synchronous training's, by which the planner ranks."""
    cells: dict[tuple[int, str], dict[str, list[str]]] = {}
    rows = quality_data(results)["rows"]
    for row in rows:
        found = cells.setdefault((row["delay"], row["method"]), {})
        updates = "not reached" if row["updates"] is None else f"{row['updates']:.2f}"
        found.setdefault(row["workload"], []).append(f"{updates} (N = {row['stages']})")
    workloads = sorted({row["workload"] for row in rows})
    lines = [
        [f"`{method}`", str(delay), *(", ".join(found.get(name, ())) for name in workloads)]
        for (delay, method), found in sorted(cells.items())
    ]
    return table(f"method|>updates late|{'|'.join(workloads)}", lines)


def quality_text(results: Path) -> str:
    """Return the file itself, one row per line."""
    data = quality_data(results)
    rows = ",\n  ".join(json.dumps(row) for row in data["rows"])
    return f'{{\n "source": {json.dumps(data["source"])},\n "rows": [\n  {rows}\n ]\n}}\n'
