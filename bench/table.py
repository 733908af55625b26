"""Formats Markdown tables and lists in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table; ``|`` separates columns, and ``>`` begins a column of figures."""
    names = columns.split("|")
    lines = [[name.removeprefix(">") for name in names], *rows]
    written = [f"| {' | '.join(cells)} |" for cells in lines]
    rule = "|".join("--:" if name.startswith(">") else "---" for name in names)
    return "\n".join([written[0], f"|{rule}|", *written[1:]])


def listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def span(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
