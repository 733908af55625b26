"""Slow links: steps that were measured, seconds that were simulated, and their product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from table import table

FOLDER = "2026-11-25-slow-links"
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}


def read(results: Path) -> Any:
    return json.loads((results / FOLDER / "slow-links.json").read_text())


def best(results: Path, setting: str) -> str:
    """Of every method and codec the number of microbatches with the least time."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in _rows(results, setting):
        key = row["method"], row["codec"]
        if key not in found or _time(row) < _time(found[key]):
            found[key] = row
    lines = [
        [
            *(f"`{row['method']}`", row["codec"], str(row["microbatches"])),
            f"{row['token_bytes']:.0f}",
            _steps(row),
            f"{row['seconds']:.1f}",
            f"{row['time']:.2f}" if row["time"] else "",
        ]
        for row in sorted(found.values(), key=_time)
    ]
    return table("method|codec|>M|>bytes a token|>steps|>s a step|>time", lines)


def by_microbatches(results: Path, setting: str) -> str:
    """Steps and seconds of every method in bfloat16, by the number of microbatches."""
    rows = [row for row in _rows(results, setting) if row["codec"] == "bfloat16"]
    numbers = sorted({row["microbatches"] for row in rows})
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = {row["microbatches"]: row for row in rows if row["method"] == method}
        cells = [
            f"{_steps(mine[m])} x {mine[m]['seconds']:.1f}" if m in mine else "" for m in numbers
        ]
        lines.append([f"`{method}`", *cells])
    return table("|".join(["method", *(f">M = {m}" for m in numbers)]), lines)


def gain(results: Path, setting: str, method: str, codec: str) -> str:
    """How many times sooner than 1F1B with the same codec, each with its best M."""
    rows = _rows(results, setting)

    def least(name: str) -> float:
        return min(_time(r) for r in rows if (r["method"], r["codec"]) == (name, codec))

    return f"{least('1f1b') / least(method):.2f} times"


def what(results: Path) -> str:
    """What was trained, for how long."""
    about = read(results)
    sizes = ", ".join(
        f"{_OPTIMIZERS[name]}: {updates} updates" for name, updates in about["updates"].items()
    )
    cpu, torch = about["cpu"].split(",")[0], about["versions"]["torch"]
    return f"{sizes}; {cpu}, torch {torch}, {about['date']}"


def _rows(results: Path, setting: str) -> list[dict[str, Any]]:
    return [row for row in read(results)["rows"] if row["setting"] == setting]


def _time(row: dict[str, Any]) -> float:
    return float("inf") if row["time"] is None else float(row["time"])


def _steps(row: dict[str, Any]) -> str:
    """The mean, with its interval where there are seeds."""
    mean, low, high = (row["interval"][name] for name in ("mean", "low", "high"))
    if mean is None:
        return "not reached"
    return f"{mean:.2f}" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"
