"""Rows of a run of bench_operators.py, their bandwidth over that of copies, and their table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from table import table

Case = list["Row"]
_STATS = {"median_us": "median", "iqr_us": "iqr", "best_us": "min"}


@dataclass(frozen=True)
class Row:
    """One implementation of one operation on one workload; times of a call in microseconds."""

    operation: str
    workload: str
    precision: str
    name: str
    kind: str  # "ours", "rival" or "copy" (of as many bytes, for comparison)
    bytes: int  # that the operation has to move at least
    elements: int
    tensors: int
    median_us: float
    iqr_us: float
    best_us: float

    @classmethod
    def of(cls, benchmark: dict[str, Any]) -> Row:
        """From an entry of pytest-benchmark's JSON."""
        about = {name: benchmark["extra_info"][name] for name in list(cls.__annotations__)[:8]}
        stats = benchmark["stats"]
        return cls(**about, **{name: stats[key] * 1e6 for name, key in _STATS.items()})

    @classmethod
    def all_of(cls, benchmarks: Iterable[dict[str, Any]]) -> list[Row]:
        """From all entries of operations."""
        return [cls.of(each) for each in benchmarks if "operation" in each["extra_info"]]


def cases(rows: Iterable[Row]) -> list[Case]:
    """Group the rows that were measured together, in turn."""
    found: dict[tuple[str, str, str], Case] = {}
    for row in rows:
        found.setdefault((row.operation, row.workload, row.precision), []).append(row)
    return list(found.values())


def share(row: Row, case: Case, best: bool = False) -> float | None:
    """Return a row's bandwidth over the fastest copy's, by medians or by best times."""

    def bandwidth(each: Row) -> float:
        return each.bytes / (each.best_us if best else each.median_us)

    copied = [bandwidth(each) for each in case if each.kind == "copy"]
    return bandwidth(row) / max(copied) if copied else None


def fastest(case: Case, kind: str) -> Row | None:
    """By medians."""
    return min((r for r in case if r.kind == kind), key=lambda r: r.median_us, default=None)


def compact(rows: Iterable[Row]) -> str:
    """One line per case: ours, its share of the copy's bandwidth, the fastest rival."""
    lines = []
    for case in cases(rows):
        mine, rival = fastest(case, "ours"), fastest(case, "rival")
        if mine is None:
            continue
        shares = share(mine, case), share(mine, case, best=True)
        cells = [mine.operation, mine.workload, mine.precision, microseconds(mine.median_us)]
        cells += [f"{mine.iqr_us / mine.median_us:.0%}", microseconds(mine.best_us)]
        cells += ["" if each is None else f"{each:.0%}" for each in shares]
        if rival is None:
            cells += ["", "", ""]
        else:
            ratio = f"{rival.median_us / mine.median_us:.2f}"
            cells += [rival.name, microseconds(rival.median_us), ratio]
        lines.append(cells)
    columns = "operation|tensors|types|>ours, us|>IQR|>best|>of copy|>of copy, best"
    return table(f"{columns}|fastest rival|>its us|>times", lines)


def microseconds(value: float) -> str:
    """Show three digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
