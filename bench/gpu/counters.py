"""Four large launches for ncu, and what it said of them."""

from __future__ import annotations

import csv
from typing import Any

from spectrain_ext.benchmark.operations import ADAMW_1, ADAMW_2, PREDICT, SGD_2, ours
from spectrain_ext.benchmark.workloads import FP32, MIXED, Streams, synthetic

from .cases import Cases
from .scale import Scale


def large_launches(cases: Cases, scale: Scale) -> None:
    """One launch of each."""
    for operation, precision in ((PREDICT, FP32), (SGD_2, FP32), (ADAMW_2, FP32), (ADAMW_1, MIXED)):
        work = synthetic((1,), scale.large[:1], precision)[0]

        def launch(operation: Any = operation, work: Any = work) -> None:
            ours(operation, Streams(work, scale.device))["Plan"]()
            scale.wait()

        cases.run(f"{operation.name}, {work.name}, {precision.name}", launch)


def metrics(text: str) -> list[dict[str, Any]]:
    """Kernels and their metrics, in the order of launches, from `ncu --csv --page details`."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[begin:]):
        name = row.get("Metric Name")
        if not name or not (row.get("ID") or "").isdigit():
            continue
        kernel = kernels.setdefault(row["ID"], {"kernel": row.get("Kernel Name"), "metrics": {}})
        key = f"{name} [{row.get('Metric Unit') or ''}]".replace(" []", "")
        kernel["metrics"][key] = row.get("Metric Value")
    return list(kernels.values())
