"""Map the name of every figure in a document to a function of the committed runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import bench_failures
from table import table

from . import (
    accuracy,
    cost,
    errors,
    frontier,
    hybrid,
    network,
    operators,
    planner,
    processes,
    races,
    slow_links,
    throughput,
    trained,
    workers,
)


def built(results: Path) -> str:
    """Time to compile, and the size of wheels."""
    names = ("the CPU only", "and one architecture, {}", "and the first of each major version")
    rows = read(results, "2026-11-22-build/build.json")["rows"]
    lines = [
        [
            name.format(f"`{row['environment']}`"),
            f"{row['wall_s']:.0f}",
            f"{row['user_s'] + row['system_s']:.0f}",
            f"{row['wheel_bytes'] / 1e6:.1f} MB",
        ]
        for name, row in zip(names, rows, strict=True)
    ]
    return table("for|>seconds|>seconds of CPU|>wheel", lines)


def built_again(results: Path) -> str:
    """Time to compile with ccache."""
    rows = read(results, "2026-11-22-build/build.json")["from_ccache"]
    return " and ".join(f"{row['wall_s']:.0f}" for row in rows) + " s"


def watched(results: Path) -> str:
    """What checking that 300 tensors have not moved adds to a call of a plan."""
    found: dict[str, dict[str, float]] = {}
    for row in read(results, "2026-11-22-host/moved.json")["rows"]:
        if " 300 tensors" in row["call"]:
            found.setdefault(row["call"], {})[row["plan"]] = row["median_us"]
    added = [us["Plan"] - us["_Unwatched"] for us in found.values()]
    return f"{min(added):.1f} to {max(added):.1f} us"


def stage_threads(results: Path) -> str:
    """CPU time of the busiest thread, with a thread for each stage of a process and without."""
    run = read(results, "2026-11-25-free-threaded/stages.json")
    variants = ("one thread", "two threads of torch's", "a thread for each stage", "two processes")
    lines = [
        [
            model["name"],
            *(
                f"{median(one['busiest'] for one in model['rounds'][each]):.2f}"
                for each in variants
            ),
        ]
        for model in run["models"]
    ]
    return table("two stages of|>" + "|>".join(variants), lines)


def faults(results: Path) -> str:
    """Number of random faults in the campaign."""
    return f"{read(results, '2026-11-22-failures/campaign.json')['faults']:,}"


def faults_failed(results: Path) -> str:
    """Number of them that ended wrongly."""
    campaign = read(results, "2026-11-22-failures/campaign.json")
    failed = campaign["faults"] - campaign["outcomes"].get("passed", 0)
    return f"{failed:,}" if failed else "none"


_UNDER_TORCHRUN = "2026-11-25-failures/campaign.json"
_WITH_COPIES = "2026-11-25-failures/copies.json"


def restarts(results: Path) -> str:
    """Cost of a failure under torchrun, by phases."""
    return bench_failures.report(read(results, _UNDER_TORCHRUN)["faults"])


def restarts_brief(results: Path) -> str:
    """Medians of a failure under torchrun: when it is known, when it is past, what is lost."""
    by_kind = bench_failures.whole_by_kind(read(results, _UNDER_TORCHRUN)["faults"])

    def line(name: str, digits: int, value: Callable[[dict[str, Any]], float]) -> list[str]:
        return [name, *(f"{median(map(value, rows)):.{digits}f}" for rows in by_kind.values())]

    lines = [
        line("seconds until another rank knows", 2, lambda row: row["seconds"]["heard"]),
        line("seconds until training is past it", 2, lambda row: sum(row["seconds"].values())),
        line("minibatches lost", 0, lambda row: row["lost"]),
    ]
    return table("|>".join(["median", *by_kind]), lines)


def restarts_count(results: Path) -> str:
    """Number of faults in these runs."""
    runs = (read(results, path) for path in (_UNDER_TORCHRUN, _WITH_COPIES))
    return f"{sum(len(run['faults']) for run in runs)}"


def restarts_failed(results: Path) -> str:
    """Number of these trainings that went wrong, by a changed bit or otherwise."""
    runs = (read(results, path) for path in (_UNDER_TORCHRUN, _WITH_COPIES))
    return f"{sum(len(run['failed']) for run in runs) or 'none'}"


def read(results: Path, path: str) -> Any:
    return json.loads((results / path).read_text())


FIGURES: dict[str, Callable[..., str]] = {
    "accuracy": accuracy.accuracies,
    "accuracy.between": accuracy.between,
    "accuracy.gaps": accuracy.gaps,
    "accuracy.models": accuracy.models,
    "accuracy.published": accuracy.published,
    "accuracy.published-means": accuracy.published_means,
    "accuracy.twice": accuracy.twice,
    "build": built,
    "build.again": built_again,
    "cost.added": cost.added,
    "cost.memory": cost.memory,
    "cost.predicting": cost.predicting,
    "cost.time": cost.time,
    "digits": trained.digits,
    "digits.time": trained.longer,
    "errors": errors.section,
    "errors.at": errors.at,
    "faults": faults,
    "faults.failed": faults_failed,
    "frontier": frontier.section,
    "frontier.best": frontier.best,
    "frontier.deep": frontier.deep,
    "frontier.deep-gap": frontier.deep_gap,
    "frontier.deep-updates": frontier.deep_updates,
    "frontier.digits": frontier.field,
    "frontier.text": frontier.text,
    "frontier.worst": frontier.worst,
    "hybrid": hybrid.accuracies,
    "hybrid.gaps": hybrid.gaps,
    "hybrid.published": hybrid.published,
    "muon": errors.muon,
    "muon.in-time": errors.muon_in_time,
    "nanogpt": frontier.nanogpt,
    "network": network.section,
    "network.meter": network.meter,
    "network.wires": network.wires,
    "operators": operators.section,
    "operators.host": operators.host,
    "operators.large": operators.large,
    "operators.targets": operators.reached,
    "planner": planner.section,
    "planner.factors": planner.factors,
    "planner.unequal": planner.unequal,
    "planner.within": planner.within,
    "processes": processes.section,
    "processes.share": processes.share,
    "processes.targets": processes.targets,
    "processes.torch": processes.over_torch,
    "processes.two": processes.two_processes,
    "python.threads": stage_threads,
    "races.even": races.even,
    "races.text": races.text_range,
    "restarts": restarts,
    "restarts.brief": restarts_brief,
    "restarts.count": restarts_count,
    "restarts.failed": restarts_failed,
    "slow-links": slow_links.section,
    "slow-links.gain": slow_links.gain,
    "slow-links.microbatches": slow_links.by_microbatches,
    "slow-links.times": slow_links.times,
    "small": trained.small,
    "throughput": throughput.section,
    "throughput.ahead": throughput.ahead,
    "throughput.assumed": throughput.assumed,
    "throughput.behind": throughput.behind,
    "throughput.reach": throughput.reach,
    "throughput.traffic": throughput.traffic,
    "watching": watched,
    "workers": workers.section,
}
