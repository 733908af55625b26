"""How far methods end from synchronous training, by depth and delay."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from table import table

#: Folders of studies: of methods over depths; of corrections, schedules and averages by others;
#: of deep delays with several optimizers.
STUDY = "2026-11-22-frontier"
FIELD = "2026-11-23-field"
DEEP = "2026-11-25-deep"

#: Columns of the summary: heading, folder, file, N, M.
_SUMMARY = (
    ("text, AdamW, M = 8", STUDY, "text", 8, 8),
    ("digits, SGD, M = 8", FIELD, "one-late", 8, 8),
    ("digits, SGD, M = 8", STUDY, "digits", 8, 8),
    ("text, SOAP, M = 1", DEEP, "text-800-soap", 8, 1),
    ("text, Muon, M = 1", DEEP, "text-800-muon", 8, 1),
    ("text, AdamW, M = 1", DEEP, "text-800-adamw", 8, 1),
    ("text, AdamW, M = 1, constant rate", STUDY, "text", 8, 1),
    ("digits, SGD, M = 1", DEEP, "digits", 8, 1),
    ("digits, SGD, M = 1", FIELD, "late", 8, 1),
    ("digits, SGD, M = 1", STUDY, "digits", 8, 1),
)
_METHODS = (
    *("auto", "second-order", "interleaved-async", "error-feedback", "spectrain-stash"),
    *("spectrain", "hybrid-pipedream", "pipedream-2bw", "wpipe", "pipedream", "vanilla"),
)

#: Variants of screens, which are in the JSON only.
_SCREENED = re.compile(r"second-order-|nadam|msnag")

Row = dict[str, Any]


def section(results: Path) -> str:
    """Gaps in per cent in eight stages: a line per method, a column per study."""
    found: dict[str, dict[str, str]] = {}
    for head, folder, name, stages, microbatches in _SUMMARY:
        for row in rows_of(results, name, folder):
            if (row["stages"], row["microbatches"]) == (stages, microbatches) and row["delay"]:
                late = 0 if folder == DEEP else row["delay"]
                cells = found.setdefault(_now(row["contender"], late), {})
                cells.setdefault(head, f"{100 * row['gap']['mean']:+.1f}")
    heads = dict.fromkeys(head for head, *_ in _SUMMARY)
    lines = [[f"`{name}`", *(found[name].get(head, "") for head in heads)] for name in _METHODS]
    return table("|".join(["gap %, N = 8", *(f">{head}" for head in heads)]), lines)


def _sooner(results: Path, workload: str) -> dict[tuple[int, str, int], str]:
    """Times to three quarters of synchronous training, by stages, method and microbatches."""
    from .races import races  # which imports this module

    return {
        (r.stages, r.method, r.microbatches): r.shown(0.75)
        for r in races(results)
        if r.workload == workload
    }


def text(results: Path) -> str:
    """All rows of the transformer, and of nanoGPT's small setting."""
    rows = [r for r in rows_of(results, "text") if not _SCREENED.search(r["contender"])]
    return (
        compared(rows, _sooner(results, "text"))
        + "\n"
        + _lines(compared(rows_of(results, "nanogpt"), {}))
    )


def field(results: Path) -> str:
    """All rows of digits, in eight stages."""
    alone = {
        (row["contender"], row["microbatches"]): row
        for folder, name in ((STUDY, "digits"), (FIELD, "late"), (FIELD, "one-late"))
        for row in rows_of(results, name, folder)
    }
    return compared(alone.values(), _sooner(results, "digits"))


def _lines(of: str) -> str:
    """A table without its head."""
    return "\n".join(of.splitlines()[2:])


def compared(rows: Iterable[Row], sooner: dict[tuple[int, str, int], str]) -> str:
    """One line per method and number of microbatches, the least gap first within a delay."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["stages"], r["delay"], r["gap"]["mean"])):
        n, m, name = row["stages"], row["microbatches"], row["contender"]
        low, mean, high = (row["gap"][key] for key in ("low", "mean", "high"))
        gap = "" if low is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
        ratio = row["updates"]["0.75"]
        lines.append(
            [
                *(str(n), f"`{_now(name, row['delay'])}`", str(m), str(row["delay"])),
                *(str(len(row["losses"])), f"{row['lr']:.3g}"),
                f"{statistics.fmean(row['losses']):.3f}",
                "" if name == "sync" else f"{100 * mean:+.1f}{gap}",
                "" if ratio is None else f"{ratio:.2f}",
                sooner.get((n, name, m), ""),
            ]
        )
    return table(
        ">N|method|>M|>delay|>seeds|>lr|>test loss|>gap %|>updates, 75 %|>time, 75 %", lines
    )


def _now(contender: str, delay: int) -> str:
    """The present name of what `auto` was when these studies were made."""
    return "second-order" if contender == "auto" and delay > 1 else contender


def deep(results: Path) -> str:
    """All rows of the studies of deep delays."""
    lines = []
    for name, said in _DEEP.items():
        for row in sorted(
            rows_of(results, name, DEEP),
            key=lambda r: (r["stages"], r["delay"], statistics.fmean(r["losses"])),
        ):
            late = row["contender"] != "sync"
            ratio = row["updates"]["0.75"] if late else None
            numbers = (row["stages"], row["microbatches"], row["delay"], len(row["losses"]))
            lines.append(
                [
                    *(said, f"`{row['contender']}`", *map(str, numbers), f"{row['lr']:.3g}"),
                    f"{statistics.fmean(row['losses']):.3f}",
                    f"{100 * row['gap']['mean']:+.1f}" if late else "",
                    "" if ratio is None else f"{ratio:.2f}",
                ]
            )
    return table("study|method|>N|>M|>delay|>seeds|>lr|>test loss|>gap %|>updates, 75 %", lines)


_DEEP = {
    "text-800-soap": "SOAP",
    "text-3200-soap": "SOAP, long",
    "text-1600-soap": "SOAP, deep",
    "text-800-muon": "Muon",
    "text-800-adamw": "AdamW",
    "digits": "digits",
    "marin": "Marin",
}


def deep_gap(results: Path, name: str, contender: str, stages: str, microbatches: str) -> str:
    """How far a row ended from synchronous training with the same optimizer."""
    return beside(deep_row(results, name, contender, stages, microbatches)["gap"]["mean"])


def deep_updates(results: Path, name: str, contender: str, stages: str, microbatches: str) -> str:
    """The least and the most of a row's updates to a loss over synchronous training's."""
    row = deep_row(results, name, contender, stages, microbatches)
    ratios = [ratio for ratio in row["updates"].values() if ratio is not None]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"


def deep_row(results: Path, name: str, contender: str, stages: str, microbatches: str) -> Row:
    at = contender, int(stages), int(microbatches)
    rows = rows_of(results, name, DEEP)
    (row,) = (r for r in rows if (r["contender"], r["stages"], r["microbatches"]) == at)
    return row


def best(results: Path) -> str:
    """The lowest end of `auto` on the transformer, at most one update late."""
    return beside(min(late_by_one(results)))


def worst(results: Path) -> str:
    """The highest of them."""
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


def rows_of(results: Path, workload: str, study: str = STUDY) -> list[Row]:
    """The rows of a workload in the folder of a study."""
    path = results / study / f"{workload}.json"
    found: list[Row] = json.loads(path.read_text())["rows"]
    return found
