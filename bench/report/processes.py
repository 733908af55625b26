"""Section of docs/results.md: two processes on this machine against the ideal and torch's own."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from spectrain_ext.benchmark.report import table

FOLDER = "2026-11-21-two-processes"
_NAMES = {
    "torch 1F1B": "torch.distributed.pipelining 1F1B",
    "torch GPipe": "torch.distributed.pipelining GPipe",
    "replicas": "one stage, `replicas=2`",
    "DDP": "DistributedDataParallel",
}


def section(results: Path) -> str:
    """Medians of the rounds' ratios, a line per candidate."""
    run = json.loads((results / FOLDER / "distributed.json").read_text())
    found: dict[str, list[float]] = run["microbatches_per_second"]

    def over(above: str, below: str) -> float:
        return median(a / b for a, b in zip(found[above], found[below], strict=True))

    lines = []
    for name in found:
        if name == "ideal":
            continue
        first, comma, rest = name.partition(", ")
        same = f"spectrain, M = {name.rpartition('M = ')[2]}"
        lines.append(
            [
                _NAMES.get(first, f"`{first}`") + comma + rest,
                f"{1 / over('ideal', name):.0%}",
                f"{over('spectrain', name):.2f}",
                f"{over(same, name):.2f}" if same in found else "",
            ]
        )
    head = table("|>of the ideal|>`spectrain` over it|>with as many updates, over it", lines)
    return f"""## Two processes

Measured: two equal stages, {run["seconds"] * 1e3:.0f} ms per forward and backward, gloo over
loopback, one thread each on two cores, torch {run["torch"]}; every candidate once in each of
{run["options"]["rounds"]} rounds, medians of the rounds' ratios
([figures](../bench/results/{FOLDER}/distributed.json)). The ideal is a stage that waits for nobody
and makes an update per microbatch, without prediction. `spectrain` makes one after every
microbatch, what has an M after M of them; the last column has `spectrain` with M microbatches per
minibatch, and so as many updates.

{head}"""
