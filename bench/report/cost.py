"""Cost: memory and time that prediction and stashing add to every stage."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from table import table

RUN = "2026-11-23-cost"
_NAMES = {"sgd": "SGD", "adamw": "AdamW"}

Case = dict[str, Any]


def section(results: Path) -> str:
    """Two tables, what they show, and how they were made."""
    document = json.loads((results / RUN / "cost.json").read_text())
    about, cases = document["environment"], document["cases"]
    smallest, *_, largest = sorted(s["parameters"] for s in cases[0]["memory"])
    return "\n\n".join(
        [
            "## Cost",
            f"A pipeline of {document['stages']} stages of {smallest / 1e6:.1f} to "
            f"{largest / 1e6:.1f} million float32 parameters each, which do not stay in the cache, "
            "in one process; figures are those of stage 0 first. "
            f"({about['cpu']}, torch {about['torch']}, one thread, {about['date'][:10]}; "
            "`bench/bench_cost.py`.)",
            "### Memory",
            "Versions of the weights that a stage holds at most, as the schedule's ledger counts "
            "them; their storages, as they were found alive in a full pipeline. Added: to weights, "
            "gradients and the optimizer's state of all stages.",
            _memory(cases),
            _equal(cases, document["alignment"]),
            "### Time",
            *_time(document),
        ]
    )


def _label(case: Case) -> list[str]:
    return [f"`{case['method']}`", str(case["microbatches"])]


def _memory(cases: Sequence[Case]) -> str:
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
    columns = "method|>M|versions|found MiB"
    return table(f"{columns}|{heads}", lines)


def _each(values: Iterable[str]) -> str:
    return ", ".join(values)


def _added(stages: Sequence[dict[str, int]]) -> float:
    """What versions beyond the first add to weights, gradients and state."""
    plain = [4 * s["parameters"] for s in stages]
    more = sum(s["counted_bytes"] - p for s, p in zip(stages, plain, strict=True))
    return more / sum(2 * p + s["state_bytes"] for s, p in zip(stages, plain, strict=True))


def _equal(cases: Sequence[Case], alignment: int) -> str:
    wrong = [
        f"{_NAMES[case['optimizer']]}, `{case['method']}` with {case['microbatches']}, stage {k}"
        for case in cases
        for k, stage in enumerate(case["memory"])
        if stage["measured_bytes"] != stage["counted_bytes"] + alignment * stage["buffers"]
    ]
    if wrong:
        return f"Not equal: {'; '.join(wrong)}."
    return (
        f"Counted and found are equal to the byte but for {alignment} bytes in each buffer, which "
        f"align it, with {' and with '.join(_NAMES.values())}; a test holds all methods to it."
    )


def _time(document: dict[str, Any]) -> Iterator[str]:
    cases = document["cases"]
    plain = _plain(cases)
    batches = list(cases[0]["time"])
    heads = [f"measured, batch {b}" for b in batches] + [f"share, batch {b}" for b in batches]
    lines = []
    for case in cases:
        times = [case["time"][b] for b in batches]
        lines.append(
            [
                *(_NAMES[case["optimizer"]], *_label(case)),
                _each(f"{s['update']:g} + {s['loads']:g}" for s in case["bytes"]),
                _each(f"{x:.1f}" for x in _counted(case, plain)),
                *(_each(f"{s['both']['median']:.1f}" for s in stages) for stages in times),
                *(_each(_percent(s["share"]["median"]) for s in stages) for stages in times),
            ]
        )
    yield (
        "Of an update and of the loads of weights (copied, predicted) for one "
        "minibatch: bytes per parameter that pass through memory, as counted from what each "
        "stage's storage was asked to do (an update that writes the forward's prediction writes a "
        "value more, one that keeps a version copies it first), and their ratio to those of a "
        "plain update (`sync`); "
        + (
            "the same ratio of times, measured in real runs, methods by turns, median of "
            f"{document['rounds']} rounds; and the share of the forward and backward that the "
            "difference comes to."
            if batches
            else "times are not measured yet."
        )
    )
    yield table("|".join(["optimizer|method|>M|bytes: update + loads|counted", *heads]), lines)
    if batches:
        yield _shows(cases, batches)


def _plain(cases: Iterable[Case]) -> dict[str, float]:
    """Bytes of an update that does nothing else, by optimizer."""
    return {c["optimizer"]: c["bytes"][0]["update"] for c in cases if c["method"] == "sync"}


def _counted(case: Case, plain: dict[str, float]) -> list[float]:
    return [(s["update"] + s["loads"]) / plain[case["optimizer"]] for s in case["bytes"]]


def _percent(share: float) -> str:
    return f"{round(share, 2) + 0.0:.0%}"  # not -0 %


def _shows(cases: Sequence[Case], batches: Sequence[str]) -> str:
    """In figures: how well bytes tell the time."""
    plain = _plain(cases)
    others = [c for c in cases if c["method"] != "sync"]
    quotients = [
        stage["both"]["median"] / counted
        for case in others
        for b in batches
        for stage, counted in zip(case["time"][b], _counted(case, plain), strict=True)
    ]
    low, _, high = statistics.quantiles(quotients, n=4)
    spreads = [
        (stage["both"]["high"] - stage["both"]["low"]) / stage["both"]["median"]
        for case in others
        for b in batches
        for stage in case["time"][b]
    ]

    ours = [case for case in others if case["method"] == "spectrain"]
    predicting = [s["update"]["median"] for c in ours for b in batches for s in c["time"][b]]
    fused = [s["update"] / plain[c["optimizer"]] for c in ours for s in c["bytes"]]
    return (
        f"Measured over counted: {statistics.median(quotients):.2f} (quartiles {low:.2f} and "
        f"{high:.2f}; the rounds of one figure span {statistics.median(spreads):.0%} of it). An "
        "update that writes its prediction takes "
        f"{statistics.median(predicting):.2f} times a plain one, {min(fused):.2f} to "
        f"{max(fused):.2f} by bytes."
    )
