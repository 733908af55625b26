"""Tables of what pytest-benchmark measured: median, spread, best, ratio to the fastest rival."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rivals.operations import OURS
from rivals.report import spread, table


@dataclass(frozen=True)
class Row:
    """One measurement, in microseconds."""

    group: str
    name: str
    median_us: float
    iqr_us: float
    best_us: float
    rounds: int


def summarize(group: str, name: str, times_s: Sequence[float]) -> Row:
    """A row from raw times in seconds."""
    median, iqr, best = spread(times_s)
    return Row(group, name, median * 1e6, iqr * 1e6, best * 1e6, len(times_s))


def from_pytest_benchmark(data: dict[str, Any]) -> list[Row]:
    """Rows of the JSON that pytest-benchmark saves."""
    rows = []
    for b in data["benchmarks"]:
        extra, stats = b.get("extra_info", {}), b["stats"]
        rows.append(
            Row(
                extra.get("group", b.get("group") or b["name"]),
                extra.get("name", b["name"]),
                stats["median"] * 1e6,
                stats["iqr"] * 1e6,
                stats["min"] * 1e6,
                stats["rounds"],
            )
        )
    return rows


def ratio_to_rival(row: Row, group: Sequence[Row]) -> float | None:
    """How many times faster than the fastest rival of the same group one of ours is."""
    rivals = [r.median_us for r in group if r.name not in OURS]
    if row.name not in OURS or not rivals:
        return None
    return min(rivals) / row.median_us


def markdown(rows: Iterable[Row]) -> str:
    """A table in Markdown; a ratio that has no meaning is left empty."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    lines = []
    for name, group in groups.items():
        for row in group:
            ratio = ratio_to_rival(row, group)
            figures = [f"{us:.1f}" for us in (row.median_us, row.iqr_us, row.best_us)]
            lines.append([name, row.name, *figures, "" if ratio is None else f"{ratio:.2f}"])
    return table("what|implementation|>median us|>IQR us|>best us|>times rival", lines)


def main(argv: Sequence[str]) -> int:
    """Print the table of a file that pytest-benchmark saved."""
    if len(argv) != 1:
        print("usage: python bench/table.py FILE  (from pytest --benchmark-json=FILE)")
        return 2
    print(markdown(from_pytest_benchmark(json.loads(Path(argv[0]).read_text()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
