"""Asynchronous data parallelism: test accuracy over the number of workers, simulated."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from table import table

from spectrain_ext.extras import picture
from studies.frontier import Interval

from .accuracy import PAIRED, apart, ended

FILE = "2026-11-22-workers/digits.json"
_COLORS = ("tab:gray", "tab:orange", "tab:green", "tab:red", "tab:blue", "tab:purple")


def read(results: Path) -> Mapping[str, Any]:
    """The committed run."""
    document: Mapping[str, Any] = json.loads((results / FILE).read_text())
    return document


def section(results: Path) -> str:
    """What was trained; accuracy, gap and rate by rule and number of workers."""
    run = read(results)
    asked = run["settings"]
    return "\n\n".join(
        [
            "## Asynchronous data parallelism",
            "Workers of one master, as [methods](methods.md#asynchronous-data-parallelism) has "
            "them: who is through next is **simulated**, losses are **measured**. A residual MLP "
            f"({run['parameters']:,} parameters) on digits, {asked['updates']} updates of "
            f"{asked['batch_size']} samples whatever the number of workers, a rate that falls "
            "linearly to zero, momentum 0.9 where a rule has one. Each rule has its own rate for "
            "each number of workers: the power of two whose neighbours have a larger test loss, "
            f"over {asked['judges']} seeds that are not counted below. {asked['seeds']} seeds; "
            f"{run['environment']['cpu']}, torch {run['environment']['torch']}.",
            "### Test accuracy, %",
            "Mean, and half of its 95 % interval (Student's t).",
            _by_workers(run, lambda row: ended(_accuracies(row), 2)),
            "### Points above or below nag-asgd",
            f"{PAIRED} The minibatches are the same, and workers' times.",
            _by_workers(run, lambda row: apart(_above(row, run), 2), leave_out="nag-asgd"),
            "### How far the weights had moved",
            "The gap: the root mean square of the master's weights less those that a gradient was "
            "computed with, in thousandths, mean over updates and seeds; each at its own rate.",
            _by_workers(run, _gap),
            "![Test accuracy of every rule over the number of workers, with 95 % intervals]"
            "(results-workers.png)",
            "### Rates taken",
            _by_workers(run, lambda row: f"{row['lr']:g}"),
        ]
    )


def _workers(run: Mapping[str, Any]) -> list[int]:
    """Those numbers that every rule was trained with: a run writes its file as it goes."""
    counts = Counter(row["workers"] for row in run["rows"])
    return sorted(n for n, rules in counts.items() if rules == len(_rules(run)))


def _rules(run: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["rule"] for row in run["rows"]))


def _row(run: Mapping[str, Any], rule: str, workers: int) -> Mapping[str, Any] | None:
    wanted = (rule, workers)
    return next((row for row in run["rows"] if (row["rule"], row["workers"]) == wanted), None)


def _by_workers(run: Mapping[str, Any], cell: Any, leave_out: str = "") -> str:
    heads = "|".join(["rule", *(f">{_named(n)}" for n in _workers(run))])
    lines = []
    for rule in _rules(run):
        if rule != leave_out:
            rows = [_row(run, rule, n) for n in _workers(run)]
            lines.append([f"`{rule}`", *("" if row is None else cell(row) for row in rows)])
    return table(heads, lines)


def _named(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _accuracies(row: Mapping[str, Any]) -> list[float | None]:
    return [None if end is None else end["accuracy"] for end in row["ends"]]


def _gap(row: Mapping[str, Any]) -> str:
    found = [end["gap"] for end in row["ends"] if end is not None]
    return f"{1000 * statistics.fmean(found):.2f}" if found else ""


def _above(row: Mapping[str, Any], run: Mapping[str, Any]) -> Interval | None:
    """None: one of the two has runs that diverged."""
    other = _row(run, "nag-asgd", row["workers"])
    if other is None or None in row["ends"] or None in other["ends"]:
        return None
    pairs = zip(row["ends"], other["ends"], strict=True)
    return Interval.of([100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs])


def draw(results: Path, folder: Path) -> None:
    """Accuracy over the number of workers."""
    run = read(results)
    workers = _workers(run)
    with picture(folder / "results-workers.png", 6.0, 4.0) as figure:
        axes = figure.subplots()
        for n, (rule, color) in enumerate(zip(_rules(run), _COLORS, strict=False)):
            places, means, halves = [], [], []
            for at, count in enumerate(workers):
                row = _row(run, rule, count)
                if row is None or None in row["ends"]:
                    continue
                interval = Interval.of([100 * end["accuracy"] for end in row["ends"]])
                places.append(at + 0.06 * (n - 2.5))
                means.append(interval.mean)
                halves.append(interval.high - interval.mean if math.isfinite(interval.high) else 0)
            axes.errorbar(places, means, halves, color=color, marker="o", capsize=2, label=rule)
        axes.set_xticks(range(len(workers)), list(map(str, workers)))
        axes.set_xlabel("workers")
        axes.set_ylabel("test accuracy, %")
        axes.grid(True, axis="y", alpha=0.3)
        axes.legend(fontsize=8)
