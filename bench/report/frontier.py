"""The generated section of docs/frontier.md: how far methods end from synchronous training."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from table import table

#: The folder of the study that docs/frontier.md tells of.
STUDY = "2026-11-22-frontier"
#: That of other people's corrections, schedules and averages.
FIELD = "2026-11-23-field"
#: That of deep delays, with several optimizers.
DEEP = "2026-11-25-deep"


def section(results: Path) -> str:
    """The decision table of a study, and all its rows: one table per file and number of stages."""
    folder = results / STUDY
    studies = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
    parts = []
    for wanted, heading in (
        (lambda row: row["delay"] == 1, "One update late at most (M >= N)"),
        (lambda row: row["delay"] > 1, "More updates late (M < N)"),
    ):
        parts += [f"### {heading}", decision(studies, wanted)]
    for name, document in studies.items():
        parts.append(f"### All of {name}")
        for n in sorted({row["stages"] for row in document["rows"]}):
            rows = [row for row in document["rows"] if row["stages"] == n]
            parts.append(f"{n} stages, {document['updates']} updates:")
            parts.append(compared(rows))
    return "\n\n".join(parts)


def field(results: Path) -> str:
    """A table per delay of that study: all rows in eight stages."""
    found = [json.loads(p.read_text()) for p in sorted((results / FIELD).glob("*.json"))]
    rows = [row for document in found for row in document["rows"]]
    # both files have synchronous training; it is the same
    alone = {(row["contender"], row["microbatches"]): row for row in rows}
    return compared(list(alone.values()))


def decision(studies: dict[str, dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]) -> str:
    """Gaps in per cent: a line per method, a column per workload, stages and microbatches."""
    found: dict[str, dict[tuple[str, int, int], str]] = {}
    for name, document in studies.items():
        for row in filter(wanted, document["rows"]):
            gap = row["gap"]["mean"]
            cell = "diverged" if gap is None else f"{100 * gap:+.1f}"
            at = (name, row["stages"], row["microbatches"])
            found.setdefault(row["contender"], {})[at] = cell
    columns = sorted({at for cells in found.values() for at in cells})
    lines = [
        [f"`{method}`", *(cells.get(at, "") for at in columns)]
        for method, cells in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    heads = [f">{name}, N = {n}, M = {m}" for name, n, m in columns]
    return table("|".join(["method", *heads]), lines)


def compared(rows: Sequence[dict[str, Any]]) -> str:
    """One line per method and number of microbatches, the least gap first within a delay."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["delay"], r["gap"]["mean"] or 0.0)):
        low, mean, high = (row["gap"][key] for key in ("low", "mean", "high"))
        gap = "diverged" if mean is None else f"{100 * mean:+.2f}"
        between = "" if low is None else f"{100 * low:+.2f} to {100 * high:+.2f}"
        if row["contender"] == "sync":
            gap = between = ""
        losses = [loss for loss in row["losses"] if loss is not None]
        lines.append(
            [
                *(f"`{row['contender']}`", str(row["microbatches"]), str(row["delay"])),
                *(str(len(row["losses"])), f"{row['lr']:.3g}"),
                f"{statistics.fmean(losses):.3f}" if len(losses) == len(row["losses"]) else "",
                f"{100 * statistics.fmean(row['accuracies']):.1f}",
                *(gap, between),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in row["updates"].values()),
                "" if row["time"] is None else f"{row['time']:.2f}",
            ]
        )
    columns = "method|>M|>delay|>seeds|>lr|>test loss|>accuracy %|>gap %|95 % interval"
    return table(f"{columns}|>updates, 50 %|>75 %|>100 %|>time", lines)


def deep(results: Path, name: str) -> str:
    """All rows of one of its studies: gaps, and updates to a loss where rates are constant."""
    rows = rows_of(results, name, DEEP)
    head = "method|>N|>M|>delay|>seeds|>lr|>test loss|>gap %"
    counted = any(None not in row["updates"].values() for row in rows)
    lines = []
    for row in sorted(rows, key=lambda r: (r["stages"], r["delay"], statistics.fmean(r["losses"]))):
        late = row["contender"] != "sync"
        numbers = (row["stages"], row["microbatches"], row["delay"], len(row["losses"]))
        updates = (f"{u:.2f}" if u is not None and late else "" for u in row["updates"].values())
        lines.append(
            [
                *(f"`{row['contender']}`", *map(str, numbers), f"{row['lr']:.3g}"),
                f"{statistics.fmean(row['losses']):.3f}",
                f"{100 * row['gap']['mean']:+.1f}" if late else "",
                *(updates if counted else ()),
            ]
        )
    return table(head + ("|>updates, 50 %|>75 %|>100 %" if counted else ""), lines)


def deep_gap(results: Path, name: str, contender: str, stages: str, microbatches: str) -> str:
    """How far a row of it ended from synchronous training with the same optimizer."""
    return beside(deep_row(results, name, contender, stages, microbatches)["gap"]["mean"])


def deep_updates(results: Path, name: str, contender: str, stages: str, microbatches: str) -> str:
    """The least and the most of a row's updates to a loss over synchronous training's."""
    row = deep_row(results, name, contender, stages, microbatches)
    ratios = [ratio for ratio in row["updates"].values() if ratio is not None]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"


def deep_row(
    results: Path, name: str, contender: str, stages: str, microbatches: str
) -> dict[str, Any]:
    at = contender, int(stages), int(microbatches)
    rows = rows_of(results, name, DEEP)
    (row,) = (r for r in rows if (r["contender"], r["stages"], r["microbatches"]) == at)
    return row


def best(results: Path) -> str:
    """Where `auto`, one update late at most, ended lowest on the transformer."""
    return beside(min(late_by_one(results)))


def worst(results: Path) -> str:
    """Where it ended highest."""
    return beside(max(late_by_one(results)))


def beside(gap: float) -> str:
    return f"{abs(100 * gap):.1f} % {'below' if gap < 0 else 'above'}"


def late_by_one(results: Path) -> list[float]:
    return [
        row["gap"]["mean"]
        for row in rows_of(results, "text")
        if row["contender"] == "auto" and row["delay"] == 1
    ]


def nanogpt(results: Path, contender: str, lr: str) -> str:
    """The test loss at the end of the one run with nanoGPT's setting."""
    (path,) = (results / STUDY / "runs").glob(f"{contender}-lr{lr}-*.json")
    loss: float = json.loads(path.read_text())["points"][-1][1]
    return f"{loss:.3f}"


def rows_of(results: Path, workload: str, study: str = STUDY) -> list[dict[str, Any]]:
    """The rows of a workload in the folder of a study."""
    path = results / study / f"{workload}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found
