"""Cost: memory and time that prediction and stashing add to every stage."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from table import table

RUN = "2026-11-23-cost"
_NAMES = {"sgd": "SGD", "adamw": "AdamW"}

Case = dict[str, Any]


def _cases(results: Path) -> list[Case]:
    found: list[Case] = json.loads((results / RUN / "cost.json").read_text())["cases"]
    return found


def memory(results: Path) -> str:
    """Versions of the weights, and the storages found alive."""
    cases = _cases(results)
    of = {(c["optimizer"], c["method"], c["microbatches"]): c["memory"] for c in cases}
    lines = []
    for (optimizer, method, m), stages in of.items():
        if optimizer != cases[0]["optimizer"]:
            continue  # the same versions
        added = (_added(of[name, method, m]) for name in _NAMES)
        lines.append(
            [
                *(f"`{method}`", str(m)),
                _each(str(s["counted_versions"]) for s in stages),
                _each(f"{s['measured_bytes'] / 2**20:.1f}" for s in stages),
                *(f"{share:.0%}" for share in added),
            ]
        )
    heads = "|".join(f">added, {name}" for name in _NAMES.values())
    columns = "method|>M|versions|MiB"
    return table(f"{columns}|{heads}", lines)


def _each(values: Iterable[str]) -> str:
    return ", ".join(values)


def _added(stages: Sequence[dict[str, int]]) -> float:
    """Return what versions beyond the first add to weights, gradients and state."""
    plain = [4 * s["parameters"] for s in stages]
    more = sum(s["counted_bytes"] - p for s, p in zip(stages, plain, strict=True))
    return more / sum(2 * p + s["state_bytes"] for s, p in zip(stages, plain, strict=True))


def time(results: Path) -> str:
    """Bytes and times of an update with its loads of weights, over a plain update."""
    cases = _cases(results)
    plain = _plain(cases)
    batches = list(cases[0]["time"])
    heads = [f"time, batch {b}" for b in batches] + [f"of the compute, batch {b}" for b in batches]
    lines = []
    for case in cases:
        if case["method"] == "sync":
            continue
        times = [case["time"][b] for b in batches]
        lines.append(
            [
                *(_NAMES[case["optimizer"]], f"`{case['method']}`", str(case["microbatches"])),
                _each(f"{x:.1f}" for x in _counted(case, plain)),
                *(_each(f"{s['both']['median']:.1f}" for s in stages) for stages in times),
                *(_percent(max(s["share"]["median"] for s in stages)) for stages in times),
            ]
        )
    return table("|".join(["optimizer|method|>M|bytes, counted", *heads]), lines)


def _plain(cases: Iterable[Case]) -> dict[str, float]:
    """Return the bytes of a plain update, by optimizer."""
    return {c["optimizer"]: c["bytes"][0]["update"] for c in cases if c["method"] == "sync"}


def _counted(case: Case, plain: dict[str, float]) -> list[float]:
    return [(s["update"] + s["loads"]) / plain[case["optimizer"]] for s in case["bytes"]]


def _percent(share: float) -> str:
    return f"{round(share, 2) + 0.0:.0%}"  # not -0 %


def predicting(results: Path) -> str:
    """Time of an update that writes its prediction, over a plain one."""
    ours = [case for case in _cases(results) if case["method"] == "spectrain"]
    times = [s["update"]["median"] for c in ours for of in c["time"].values() for s in of]
    return f"{statistics.median(times):.2f} times"


def added(results: Path, method: str, optimizer: str) -> str:
    """What a method with one microbatch adds to weights, gradients and state."""
    (case,) = (
        c
        for c in _cases(results)
        if (c["method"], c["optimizer"], c["microbatches"]) == (method, optimizer, 1)
    )
    return f"{_added(case['memory']):.0%}"
