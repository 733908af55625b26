"""What a link with delay leaves of the throughput: a table of docs/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from table import table

_RUN = "2026-11-21-two-processes/network.json"
_WINDOWS = {"classic": "classic, 2 and 1", "wide": "wide, 3 and 1"}


def section(results: Path) -> str:
    """Ratios round by round, their median and range."""
    run = json.loads((results / _RUN).read_text())
    lines = []
    for window, rounds in run["rounds"].items():
        kept = [one["slow"] / one["without"] for one in rounds]
        simulated = [one["predicted_slow"] / one["predicted_without"] for one in rounds]
        lines.append(
            [
                _WINDOWS[window],
                spread(kept),
                f"{median(simulated):.2f}",
                spread(s / k for s, k in zip(simulated, kept, strict=True)),
                spread(one["predicted_slow"] / one["slow"] for one in rounds),
            ]
        )
    delay = run["options"]["delay"]
    return table(
        f"window|>throughput kept with {delay:.0f} ms|>kept, simulated"
        "|>simulated over measured, kept|>and minibatches per second",
        lines,
    )


def spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
