"""Throughput of processes, over the ideal and over other implementations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from table import table

FOLDER = "2026-11-24-processes"

_NAMES = {
    "1F1B": "`1f1b`",
    "GPipe": "`gpipe`",
    "torch 1F1B": "torch.distributed.pipelining 1F1B",
    "torch GPipe": "torch.distributed.pipelining GPipe",
    "replicas": "one stage with replicas",
    "DDP": "DistributedDataParallel",
}
_WITH_M = ("auto", "spectrain", *_NAMES)
_TARGET = 0.95

Figures = dict[str, list[float]]


def _read(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / FOLDER / "measured.json").read_text())
    return found


def _over(figures: Figures, above: str, below: str) -> list[float]:
    """Return ratios round by round: a disturbance affects all candidates of a round."""
    return [a / b for a, b in zip(figures[above], figures[below], strict=True)]


def _median(figures: Figures, above: str, below: str) -> float:
    return median(_over(figures, above, below))


def section(results: Path) -> str:
    """Shares of the ideal by the number of processes: medians of the rounds, and ranges."""
    run = _read(results)
    counts = [int(n) for n in run["ranks"]]
    figures: dict[int, Figures] = {
        n: run["ranks"][str(n)]["microbatches_per_second"] for n in counts
    }

    def line(label: str, name: Callable[[int], str]) -> list[str]:
        return [label, *(_share(figures[n], name(n)) for n in counts)]

    def fixed(name: str) -> Callable[[int], str]:
        return lambda n: name

    def with_m(name: str, times: int) -> Callable[[int], str]:
        return lambda n: f"{name}, M = {times * n}"

    lines = [
        line("`vanilla`", fixed("vanilla")),
        line("`spectrain`", fixed("spectrain")),
        line("`pipedream`", fixed("pipedream")),
        line("`spectrain`, wide window", fixed("spectrain, wide window")),
    ]
    for times, m in ((1, "N"), (2, "2N")):
        for name in _WITH_M:
            lines.append(line(f"{_NAMES.get(name, f'`{name}`')}, M = {m}", with_m(name, times)))
    return table("|".join(["of the ideal", *(f">N = {n}" for n in counts)]), lines)


def over_torch(results: Path) -> str:
    """Throughput of ``auto`` over torch's 1F1B with as many microbatches: a range."""
    run = _read(results)
    found = [
        _median(figures, name, f"torch 1F1B, M = {name.partition(' = ')[2]}")
        for figures in (each["microbatches_per_second"] for each in run["ranks"].values())
        for name in figures
        if name.startswith("auto, M = ")
    ]
    return f"{min(found):.2f} to {max(found):.2f} times"


def _share(figures: Figures, name: str) -> str:
    if name not in figures:
        return "not measured"
    shares = _over(figures, name, "ideal")
    return f"{_percent(median(shares))} ({100 * min(shares):.0f} to {100 * max(shares):.0f})"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def two_processes(results: Path) -> str:
    """Two processes: the M of one row belong to its figures, in order."""
    run = _read(results)["ranks"]["2"]
    figures: Figures = run["microbatches_per_second"]
    rows: dict[str, list[str]] = {}
    for name in figures:
        first, comma, rest = name.partition(", M = ")
        if name != "ideal":
            rows.setdefault(f"{first}{comma and ', M'}", []).append(rest)
    lines = []
    for row, ms in rows.items():
        first, comma, _ = row.partition(", M")
        names = [f"{first}, M = {m}" if comma else first for m in ms]
        label = _NAMES.get(
            first, f"`{first.partition(',')[0]}`{first[len(first.partition(',')[0]) :]}"
        )
        same = [f"spectrain, M = {m}" for m in ms]
        lines.append(
            [
                f"{label}, M = {', '.join(ms)}" if comma else label,
                ", ".join(f"{_median(figures, name, 'ideal') * 100:.0f}" for name in names) + " %",
                ", ".join(f"{_median(figures, 'spectrain', name):.2f}" for name in names),
                ", ".join(
                    f"{_median(figures, like, name):.2f}"
                    for like, name in zip(same, names, strict=True)
                    if like in figures
                ),
            ]
        )
    return table(
        "two processes|of the ideal|`spectrain` over it|`spectrain` with the same M over it", lines
    )


def share(results: Path, above: str, below: str) -> str:
    """Throughput of one candidate over another's in two processes."""
    figures: Figures = _read(results)["ranks"]["2"]["microbatches_per_second"]
    return _percent(_median(figures, above, below), 1)


def targets(results: Path) -> str:
    """Targets of two processes, and whether they are reached."""
    figures: Figures = _read(results)["ranks"]["2"]["microbatches_per_second"]
    ideal = _median(figures, "spectrain", "ideal")
    vanilla = _median(figures, "spectrain", "vanilla")
    first = _median(figures, "spectrain", "torch 1F1B, M = 2")
    ahead = [_median(figures, f"spectrain, M = {m}", f"torch 1F1B, M = {m}") for m in (2, 4, 8, 16)]
    rows = [
        ("the ideal", ">= 95 %", _percent(ideal, 1), ideal >= 0.95),
        ("`vanilla`", ">= 97 %", _percent(vanilla, 1), vanilla >= 0.97),
        ("torch's 1F1B, M = 2", ">= 1.30x", f"{first:.2f}x", first >= 1.3),
        (
            "torch's 1F1B, same M = 2, 4, 8, 16",
            ">= 1.00x",
            ", ".join(f"{ratio:.2f}" for ratio in ahead) + "x",
            min(ahead) >= 1.0,
        ),
    ]
    return table(
        "throughput of `spectrain` over|target|measured|reached",
        [[*words, "yes" if reached else "**no**"] for *words, reached in rows],
    )
