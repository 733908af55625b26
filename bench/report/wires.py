"""Seconds to a loss over slow links: measured with processes, and simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from table import spread, table

from spectrain_ext.extras import picture
from studies.looks import looks

from . import read

#: Processes behind inbound wires (`bench_slow_links.py`).
WIRES = "2026-11-27-wires/slow-links.json"
_DASHES: dict[str, Any] = {"bfloat16": "solid", "int4-hadamard": (0, (1, 1))}

Row = dict[str, Any]


def _rows(results: Path) -> list[Row]:
    found: list[Row] = read(results, WIRES)["rows"]
    return found


def _first(rows: list[Row], ranks: int) -> Row:
    """Return what the others are compared with: `1f1b` in bfloat16."""
    wanted = ranks, "1f1b", "bfloat16"
    return next(r for r in rows if (r["ranks"], r["name"], r["codec"]) == wanted)


def measured(results: Path) -> str:
    """Updates and seconds to the loss of `1f1b`, and seconds of an update beside simulated ones."""
    rows = _rows(results)
    lines = []
    for row in rows:
        seconds, pace, simulated = (
            row[name] for name in ("seconds_to_goal", "seconds_per_update", "simulated")
        )
        name = row["name"] if row["name"].startswith("torch") else f"`{row['name']}`"
        over = None if seconds is None else seconds / _first(rows, row["ranks"])["seconds_to_goal"]
        busiest = max(rank["computed"] for rank in row["of_ranks"]) / row["updates"]
        lines.append(
            [
                *(str(row["ranks"]), name, row["codec"], str(row["microbatches"])),
                f"{row['lr']:.4g}",
                *(
                    ["not reached", "", ""]
                    if over is None
                    else [str(row["updates_to_goal"]), f"{seconds:.1f}", f"{over:.2f}"]
                ),
                spread([1e3 * each for each in row["paces"]], 0),
                "" if simulated is None else f"{1e3 * simulated:.0f}",
                f"{busiest / pace:.0%}",
            ]
        )
    heads = (">N", "schedule", "messages", ">M", ">lr", ">updates", ">s", ">over `1f1b`, bfloat16")
    return table("|".join([*heads, ">ms per update", ">simulated", ">computing"]), lines)


def to_loss(results: Path, name: str) -> list[float]:
    """Return seconds of a method to the loss over those of `1f1b`, by codec and ranks."""
    rows = _rows(results)
    flushing = {(r["ranks"], r["codec"]): r for r in rows if r["name"] == "1f1b"}
    return [
        r["seconds_to_goal"] / flushing[r["ranks"], r["codec"]]["seconds_to_goal"]
        for r in rows
        if r["name"] == name
    ]


def draw(results: Path, path: Path) -> None:
    """Draw losses over measured seconds, and over simulated ones, with most processes."""
    rows = _rows(results)
    most = max(row["ranks"] for row in rows)
    shown = [row for row in rows if row["ranks"] == most and row["name"] != "zb-h1"]
    look = looks(row["name"] for row in shown)
    with picture(path, 10.0, 4.2) as figure:
        left = figure.add_subplot(1, 2, 1)
        right = figure.add_subplot(1, 2, 2, sharex=left, sharey=left)
        for row in shown:
            every = row["updates"] // len(row["losses"])
            line: dict[str, Any] = {"color": look[row["name"]].color}
            line |= {"linestyle": _DASHES[row["codec"]], "linewidth": 1.3}
            label = f"{row['name']}, {row['codec']}"
            left.plot(row["moments"], row["losses"], label=label, **line)
            if row["simulated"] is not None:
                moments = [(i + 1) * every * row["simulated"] for i in range(len(row["losses"]))]
                right.plot(moments, row["losses"], **line)
        for axes, title in ((left, "measured"), (right, "simulated")):
            axes.axhline(shown[0]["goal"], color="#777777", linewidth=0.8)
            axes.set_title(f"{title}, {most} processes", fontsize=10)
            axes.set_xlabel("seconds")
            axes.grid(True, alpha=0.3)
        lowest = min(min(row["losses"]) for row in shown)
        left.set_ylim(lowest - 0.03, lowest + 0.75)
        left.set_ylabel("mean loss of the last 25 minibatches")
        left.legend(frameon=False, fontsize=7)
