"""Formats Markdown tables and their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import quantiles


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table; ``|`` separates columns, and ``>`` begins a column of figures."""
    names = columns.split("|")
    lines = [[name.removeprefix(">") for name in names], *rows]
    written = [f"| {' | '.join(cells)} |" for cells in lines]
    rule = "|".join("--:" if name.startswith(">") else "---" for name in names)
    return "\n".join([written[0], f"|{rule}|", *written[1:]])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return a cell with the median and the quartiles."""
    low, middle, high = (
        quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
