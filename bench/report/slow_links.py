"""Slow links: measured steps, simulated seconds, and their product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from table import table

FOLDER = "2026-11-25-slow-links"
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


def read(results: Path) -> Any:
    return json.loads((results / FOLDER / "slow-links.json").read_text())


def times(results: Path) -> str:
    """Times to the loss: a line per optimizer and codec, a column per method."""
    best = {
        (row["setting"], row["codec"], row["method"]): row
        for setting in _OPTIMIZERS
        for row in _best(results, setting)
    }
    methods = ("1f1b", "zb-h1", "pipedream-2bw", "vanilla", "auto")
    lines = []
    for setting, codec in dict.fromkeys((setting, codec) for setting, codec, _ in best):
        cells = []
        for method in methods:
            row = best.get((setting, codec, method))
            shown = "" if row is None else f"{row['time']:.2f}" if row["time"] else "not reached"
            cells.append(shown)
        bytes_ = next(r["token_bytes"] for key, r in best.items() if key[:2] == (setting, codec))
        lines.append([_OPTIMIZERS[setting], codec, f"{bytes_:.0f}", *cells])
    heads = (f">`{method}`" for method in methods)
    return table("|".join(["optimizer|codec|>bytes a token", *heads]), lines)


def section(results: Path) -> str:
    """Steps, seconds and times of every method and codec, at its best number of microbatches."""
    lines = [
        [
            *(_OPTIMIZERS[setting], f"`{row['method']}`", row["codec"]),
            *(str(row["microbatches"]), _steps(row), f"{row['seconds']:.1f}"),
            f"{row['time']:.2f}" if row["time"] else "",
        ]
        for setting in _OPTIMIZERS
        for row in _best(results, setting)
    ]
    return table("optimizer|method|codec|>M|>steps|>s a step|>time", lines)


def _best(results: Path, setting: str) -> list[dict[str, Any]]:
    """Return the number of microbatches with the least time, for every method and codec."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in _rows(results, setting):
        key = row["method"], row["codec"]
        if key not in found or _time(row) < _time(found[key]):
            found[key] = row
    return sorted(found.values(), key=_time)


def by_microbatches(results: Path) -> str:
    """Steps and seconds of every method with AdamW in bfloat16, by the number of microbatches."""
    rows = [row for row in _rows(results, "adamw") if row["codec"] == "bfloat16"]
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


def _rows(results: Path, setting: str) -> list[dict[str, Any]]:
    return [row for row in read(results)["rows"] if row["setting"] == setting]


def _time(row: dict[str, Any]) -> float:
    return float("inf") if row["time"] is None else float(row["time"])


def _steps(row: dict[str, Any]) -> str:
    """The mean, with its interval where there are several seeds."""
    mean, low, high = (row["interval"][name] for name in ("mean", "low", "high"))
    if mean is None:
        return "not reached"
    return f"{mean:.2f}" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"
