"""Simulated against measured throughput over slow links."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from table import table

_RUN = "2026-11-21-two-processes/network.json"
_WAN = "2026-11-25-wan/wan.json"
_RECORDS = {"dense": "dense", "subspace": "subspace of rank 160"}
_WINDOWS = {"classic": "classic, 2 and 1", "wide": "wide, 3 and 1"}


def section(results: Path) -> str:
    """Throughput kept over a link with delay: medians of the rounds, and ranges."""
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


def wires(results: Path) -> str:
    """Processes behind inbound wires: medians of the rounds, and the simulation."""
    run = json.loads((results / _WAN).read_text())
    lines = []
    for name, rounds in run["seconds"].items():
        method, parts = name.split(", M = ")
        planned, apart = run["simulated"][name], run["apart"][name]
        figures = [f"{each * 1e3:.0f}" for each in (median(rounds), planned, apart)]
        lines.append([f"`{method}`", parts, *figures, spread(planned / each for each in rounds)])
    return table(
        "method|>M|>ms per minibatch|>simulated|>simulated, a wire for each direction"
        "|>simulated over measured",
        lines,
    )


def meter(results: Path) -> str:
    """Published seconds per step, and simulated ones."""
    records = json.loads((results / _WAN).read_text())["published"]
    lines = [
        [
            _RECORDS[name],
            *(f"{each[key]:,}" for key in ("microbatches", "bytes")),
            f"{each['off']:.3f}",
            *(f"{each[key]:.1f}" for key in ("on", "simulated")),
            f"{each['simulated'] / each['on']:.3f}",
        ]
        for name, each in records.items()
    ]
    return table("record|>M|>bytes a token|>s a step, links off|>on|>simulated|>ratio", lines)


def spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
