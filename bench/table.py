"""Tables of measured times: median, spread, bandwidth, share of the best copy, ratios."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Implementations that are this package's own; the others are rivals.
OURS = ("operator", "Plan")


@dataclass(frozen=True)
class Row:
    """One measurement: microseconds, GB/s (1e9 bytes); None where it has no meaning."""

    group: str
    name: str
    median_us: float
    iqr_us: float
    best_us: float
    rounds: int
    gb_per_s: float | None = None
    share_of_copy: float | None = None


def summarize(
    group: str,
    name: str,
    times_s: Sequence[float],
    nbytes: int | None = None,
    copy_gb_per_s: float | None = None,
) -> Row:
    """A row from raw times in seconds."""
    if not times_s:
        raise ValueError(f"{group}, {name}: no measured times")
    median = statistics.median(times_s)
    quarters = statistics.quantiles(times_s, n=4) if len(times_s) > 1 else [median] * 3
    rate = None if not nbytes else nbytes / median / 1e9
    share = None if rate is None or not copy_gb_per_s else rate / copy_gb_per_s
    spread, best = quarters[2] - quarters[0], min(times_s)
    return Row(group, name, median * 1e6, spread * 1e6, best * 1e6, len(times_s), rate, share)


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
                extra.get("gb_per_s"),
                extra.get("share_of_copy"),
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
    """A table in Markdown; a figure that was not measured is left empty."""

    def number(x: float | None, form: str) -> str:
        return "" if x is None else format(x, form)

    rows = list(rows)
    lines = [
        "| what | implementation | median us | IQR us | best us | GB/s | of copy | times torch |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for name, group in groups.items():
        for row in group:
            share = number(row.share_of_copy, ".0%")
            ratio = number(ratio_to_rival(row, group), ".2f")
            lines.append(
                f"| {name} | {row.name} | {row.median_us:.1f} | {row.iqr_us:.1f} | "
                f"{row.best_us:.1f} | "
                f"{number(row.gb_per_s, '.1f')} | {share} | {ratio} |"
            )
    return "\n".join(lines)


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries."""
    return [asdict(r) for r in rows]


def main(argv: Sequence[str]) -> int:
    """Print the table of a file that pytest-benchmark saved."""
    if len(argv) != 1:
        print("usage: python bench/table.py FILE  (from pytest --benchmark-json=FILE)")
        return 2
    print(markdown(from_pytest_benchmark(json.loads(Path(argv[0]).read_text()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
