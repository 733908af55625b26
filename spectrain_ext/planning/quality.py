"""Quality: what a delay was found to cost each method, and where; from the committed frontier."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from spectrain_ext.method import Method
from spectrain_ext.schedule import flushes


class Quality(NamedTuple):
    """What was measured of a method at a delay, against synchronous training.

    Attributes:
        low: the least gap of the test loss over workloads, after as many updates: 0.01 is 1 % more.
        high: the largest.
        where: the workloads with their stages, that of the largest gap first.
        updates: those to the loss that synchronous training has after three quarters of its own,
            over these; of the workload that needs most. Infinite: one did not get there.
    """

    low: float
    high: float
    where: tuple[str, ...]
    updates: float


SYNCHRONOUS = Quality(0.0, 0.0, (), 1.0)


@lru_cache
def measurements() -> tuple[dict[str, Any], ...]:
    """The rows of ``quality.json``: one per workload, method, stages and microbatches.

    It is made of a study's results: see docs/frontier.md for what was trained and how.
    """
    text = (files(__package__) / "quality.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["rows"])


def expected(method: Method, stages: int, delay: int) -> Quality | None:
    """What is known of a method with this delay; None: it was not measured.

    Of every workload the row with the most similar number of stages counts.
    """
    if flushes(method.schedule) or delay == 0:
        return SYNCHRONOUS
    nearest: dict[str, dict[str, Any]] = {}
    for row in measurements():
        if row["method"] == method.name and row["delay"] == delay:
            known = nearest.get(row["workload"])
            if known is None or _far(row, stages) < _far(known, stages):
                nearest[row["workload"]] = row
    if not nearest:
        return None
    rows = sorted(nearest.values(), key=_gap, reverse=True)
    return Quality(
        _gap(rows[-1]),
        _gap(rows[0]),
        tuple(f"{row['workload']}, N = {row['stages']}" for row in rows),
        max(math.inf if row["updates"] is None else row["updates"] for row in rows),
    )


def _gap(row: dict[str, Any]) -> float:
    return math.inf if row["gap"] is None else float(row["gap"])


def _far(row: dict[str, Any], stages: int) -> float:
    return abs(math.log(row["stages"] / stages))
