"""Prints the comparison table after a benchmark run and pins what would blur it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from table import Row, markdown


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table of everything that was measured in this run."""
    session = getattr(config, "_benchmarksession", None)
    rows = []
    for bench in getattr(session, "benchmarks", []):
        extra = bench.extra_info
        if not bench.stats.rounds or "name" not in extra:
            continue
        stats = bench.stats
        rows.append(
            Row(
                extra["group"],
                extra["name"],
                stats.median * 1e6,
                stats.iqr * 1e6,
                stats.min * 1e6,
                stats.rounds,
            )
        )
    if rows:
        terminalreporter.section("measured")
        terminalreporter.write_line(markdown(rows))
    for line in getattr(config, "_own_cost", []):
        terminalreporter.write_line(line)
