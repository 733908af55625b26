"""Formats Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table; ``|`` separates columns, and ``>`` begins a column of figures."""
    names = columns.split("|")
    lines = [[name.removeprefix(">") for name in names], *rows]
    written = [f"| {' | '.join(cells)} |" for cells in lines]
    rule = "|".join("--:" if name.startswith(">") else "---" for name in names)
    return "\n".join([written[0], f"|{rule}|", *written[1:]])
