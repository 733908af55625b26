"""Throughput and cost: processes, planner, weight versions, slow links, failures, operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import bench_calls
import bench_failures
import bench_pipeline
from rivals import targets
from rivals.rows import Row, cases, fastest, microseconds
from table import table

from . import read

PROCESSES = "2026-11-24-processes/measured.json"
PLAN = "2026-11-22-plan/plan.json"
COST = "2026-11-23-cost/cost.json"
SLOW_LINKS = "2026-11-25-slow-links/slow-links.json"
OPERATORS = "2026-11-23-operators/bench.json"
SMALL = "2026-11-26-small/bench.json"
ON_GPU = "2026-11-26-gpu-h200/operators.json"
GPU_STEPS = "2026-11-26-gpu-h200/parts.json"
CALLS = "2026-11-29-calls/calls.json"
FAILURES = "2026-11-25-failures/campaign.json"

Figures = dict[str, list[float]]


# Processes

#: Candidates in the file that have no number of microbatches in their name, and those that have.
_PLAIN = {
    "vanilla": "`vanilla`",
    "spectrain": "`spectrain`",
    "pipedream": "`pipedream`",
    "spectrain, wide window": "`spectrain`, wide window",
}
_NAMES = {
    "auto": "`auto`",
    "spectrain": "`spectrain`",
    "1F1B": "`1f1b`",
    "GPipe": "`gpipe`",
    "torch 1F1B": "torch.distributed.pipelining 1F1B",
    "torch GPipe": "torch.distributed.pipelining GPipe",
    "replicas": "one stage with replicas",
    "DDP": "DistributedDataParallel",
}


def _figures(results: Path) -> dict[int, Figures]:
    ranks = read(results, PROCESSES)["ranks"]
    return {int(n): run["microbatches_per_second"] for n, run in ranks.items()}


def _over(figures: Figures, above: str, below: str) -> list[float]:
    """Return ratios round by round: a disturbance affects all candidates of a round."""
    return [a / b for a, b in zip(figures[above], figures[below], strict=True)]


def processes(results: Path) -> str:
    """Shares of the ideal by the number of processes: medians of the rounds, and ranges."""
    of = _figures(results)

    def cell(n: int, name: str) -> str:
        if name not in of[n]:
            return "not measured"
        shares = [100 * share for share in _over(of[n], name, "ideal")]
        return f"{median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f})"

    lines = [[said, *(cell(n, name) for n in of)] for name, said in _PLAIN.items()]
    for times, m in ((1, "N"), (2, "2N")):
        for name, said in _NAMES.items():
            lines.append([f"{said}, M = {m}", *(cell(n, f"{name}, M = {times * n}") for n in of)])
    return table("|".join(["of the ideal", *(f">N = {n}" for n in of)]), lines)


def over_torch(results: Path) -> list[float]:
    """Return the throughput of ``auto`` over torch's 1F1B with as many microbatches."""
    return [
        median(_over(figures, name, f"torch 1F1B, M = {name.partition(' = ')[2]}"))
        for figures in _figures(results).values()
        for name in figures
        if name.startswith("auto, M = ")
    ]


def planner(results: Path) -> str:
    """How far planned periods are from measured ones, by the number of processes."""

    def ratios(rows: Iterable[dict[str, Any]], kind: str) -> list[float]:
        """Return planned over measured: the medians of the rounds' ratios."""
        pairs = (zip(row[f"planned{kind}"], row[f"measured{kind}"], strict=True) for row in rows)
        return [median(planned / measured for planned, measured in each) for each in pairs]

    lines = []
    for run in read(results, PLAN)["runs"]:
        periods, work = (ratios(run["rows"], kind) for kind in ("", "_work"))
        off = sorted(abs(ratio - 1) for ratio in periods)
        missed = [(p, w) for p, w in zip(periods, work, strict=True) if abs(p - 1) > 0.1]
        lines.append(
            [
                f"{run['processes']} processes",
                *(str(len(periods)), str(len(periods) - len(missed))),
                *(f"{100 * each:.0f} %" for each in (median(off), off[-1])),
                str(sum(period < 1 for period, _ in missed)),
                str(sum(abs(w - 1) > 0.1 for _, w in missed)),
            ]
        )
    heads = "|>configurations|>within 10 %|>median error|>largest|>missed: slower than planned"
    return table(f"{heads}|>missed: CPU time off by more than 10 %", lines)


# Prediction and stashing

_OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}


def memory(results: Path) -> str:
    """Versions of the weights, and the storages found alive."""
    by = {(c["method"], c["microbatches"]): {} for c in read(results, COST)["cases"]}
    for case in read(results, COST)["cases"]:
        by[case["method"], case["microbatches"]][case["optimizer"]] = case["memory"]
    lines = []
    for (method, m), of in by.items():
        stages = of["sgd"]  # AdamW has the same versions
        lines.append(
            [
                *(f"`{method}`", str(m)),
                ", ".join(str(s["counted_versions"]) for s in stages),
                ", ".join(f"{s['measured_bytes'] / 2**20:.1f}" for s in stages),
                *(f"{_added(of[name]):.0%}" for name in ("sgd", "adamw")),
            ]
        )
    return table("method|>M|versions|MiB|>added, SGD|>added, AdamW", lines)


def _added(stages: Sequence[dict[str, int]]) -> float:
    """Return what versions beyond the first add to weights, gradients and state."""
    plain = [4 * s["parameters"] for s in stages]
    more = sum(s["counted_bytes"] - p for s, p in zip(stages, plain, strict=True))
    return more / sum(2 * p + s["state_bytes"] for s, p in zip(stages, plain, strict=True))


def update(results: Path) -> str:
    """Bytes and times of an update with its loads of weights, over a plain update."""
    cases: list[dict[str, Any]] = read(results, COST)["cases"]
    plain = {c["optimizer"]: c["bytes"][0]["update"] for c in cases if c["method"] == "sync"}
    batches = list(cases[0]["time"])
    heads = [f"time, batch {b}" for b in batches] + [f"of the compute, batch {b}" for b in batches]
    lines = []
    for case in (case for case in cases if case["method"] != "sync"):
        times = [case["time"][b] for b in batches]
        over = plain[case["optimizer"]]
        shares = [max(s["share"]["median"] for s in stages) for stages in times]
        lines.append(
            [
                *(_OPTIMIZERS[case["optimizer"]], f"`{case['method']}`", str(case["microbatches"])),
                ", ".join(f"{(s['update'] + s['loads']) / over:.1f}" for s in case["bytes"]),
                *(", ".join(f"{s['both']['median']:.1f}" for s in stages) for stages in times),
                *(f"{round(share, 2) + 0.0:.0%}" for share in shares),  # not -0 %
            ]
        )
    return table("|".join(["optimizer|method|>M|bytes, counted", *heads]), lines)


# Slow links, failures, operators


def slow_links(results: Path) -> str:
    """Times to the loss by optimizer, codec and method, each at its best M."""
    best: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in read(results, SLOW_LINKS)["rows"]:
        key = row["setting"], row["codec"], f"{row['token_bytes']:.0f}"
        of = best.setdefault(key, {})
        taken = float("inf") if row["time"] is None else row["time"]
        of[row["method"]] = min(taken, of.get(row["method"], taken))

    def cell(taken: float | None) -> str:
        if taken is None:
            return ""
        return f"{taken:.2f}" if taken < float("inf") else "not reached"

    names = ("1f1b", "zb-h1", "pipedream-2bw", "vanilla", "auto")
    lines = [
        [_OPTIMIZERS[setting], codec, size, *(cell(of.get(name)) for name in names)]
        for (setting, codec, size), of in sorted(
            best.items(), key=lambda each: (each[0][0], int(each[0][2]))
        )
    ]
    return table("|".join(["optimizer|codec|>bytes a token", *(f">`{n}`" for n in names)]), lines)


def restarts(results: Path) -> str:
    """Medians of a failure under torchrun: when it is known, when it is past, what is lost."""
    by_kind = bench_failures.whole_by_kind(read(results, FAILURES)["faults"])

    def line(name: str, digits: int, value: Callable[[dict[str, Any]], float]) -> list[str]:
        return [name, *(f"{median(map(value, rows)):.{digits}f}" for rows in by_kind.values())]

    lines = [
        line("seconds until another rank knows", 2, lambda row: row["seconds"]["heard"]),
        line("seconds until training is past it", 2, lambda row: sum(row["seconds"].values())),
        line("minibatches lost", 0, lambda row: row["lost"]),
    ]
    return table("|>".join(["median", *by_kind]), lines)


def operator_targets(results: Path, run: str = OPERATORS) -> str:
    """Targets and measured figures."""
    document = read(results, run)
    return targets.markdown(targets.judged(document["machine_info"], document["benchmarks"]))


def operators(results: Path, run: str = OPERATORS) -> str:
    """Times of operations, and how many times faster they are than the fastest rival."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for case in cases(Row.all_of(read(results, run)["benchmarks"])):
        mine, rival = fastest(case, "ours"), fastest(case, "rival")
        if mine is not None:
            ratio = f", {rival.median_us / mine.median_us:.2f}x" if rival else ""
            line = found.setdefault((mine.operation, mine.precision), {})
            line[mine.workload] = f"{microseconds(mine.median_us)}{ratio}"
    workloads = list(dict.fromkeys(name for line in found.values() for name in line))
    lines = [
        [operation, precision, *(line.get(name, "") for name in workloads)]
        for (operation, precision), line in found.items()
    ]
    return table("|".join(["operation|types", *(f">{name}" for name in workloads)]), lines)


def small(results: Path) -> str:
    """Times of short lists over a plan's: medians, ± half of the range between the quartiles."""
    lines = []
    rows = Row.all_of(read(results, SMALL)["benchmarks"])
    for case in cases(sorted(rows, key=lambda row: row.operation, reverse=True)):
        by = {row.name: row for row in case}
        plan, others = by["Plan"], (by["operator"], by.get("_foreach") or by["foreach"])
        us = plan.median_us
        cells = [f"{row.median_us / us:.2f} ± {row.iqr_us / 2 / us:.2f}" for row in others]
        own = f"{microseconds(us)} ± {plan.iqr_us / 2 / us:.0%}"
        lines.append([plan.operation, plan.workload, own, *cells])
    return table("operation|tensors|>`Plan`, us|>call|>torch's `_foreach`", lines)


def gpu_steps(results: Path) -> str:
    """Cases of each step of gpu_suite.py, by outcome; those of "tests" are files."""
    words = ("ok", "failed", "skipped", "no time left")
    lines = []
    for name, part in read(results, GPU_STEPS).items():
        outcomes = [case["status"] for case in part.values()]
        lines.append([f"`{name}`", *(str(outcomes.count(word) or "") for word in words)])
    return table("|".join(["step", *(f">{word}" for word in words)]), lines)


#: Bytes a second of an H200's memory, as published.
_PEAK = 4.8e12


def gpu_host(results: Path) -> str:
    """The CPU's time for an instruction of tiny stages on one GPU, by method."""
    part = read(results, GPU_STEPS)["host-cost"]
    found = {name: case["result"] for name, case in part.items() if case["status"] == "ok"}
    modules = found.pop("modules")["median_us"] / bench_pipeline.INSTRUCTIONS
    own = {name: each["own_cost_us_per_action"] for name, each in found.items()}
    lines = [
        [f"`{name}`", f"{us:.0f}", f"{us + modules:.0f}", f"{us / modules:.2f}"]
        for name, us in sorted(own.items(), key=lambda each: each[1])
    ]
    lines.insert(0, ["the modules alone", "", f"{modules:.0f}", ""])
    return table("us per instruction|>of its own|>in all|>own over the modules'", lines)


def calls(results: Path) -> str:
    """Calls of CUDA and of torch per instruction, counted without a device."""
    return bench_calls.written(read(results, CALLS)["counts"])


def gpu_training(results: Path) -> str:
    """Throughput of `auto` and of `1f1b` in eight stages on one GPU."""
    part = read(results, GPU_STEPS)["training"]
    lines = []
    for name, case in part.items():
        if case["status"] == "ok":
            found = case["result"]
            speeds = (f"{found[method]['minibatches_per_s']:.2f}" for method in ("auto", "1f1b"))
            lines.append([name, found["backend"], *speeds, f"{found['auto_over_1f1b']:.2f}"])
    return table("|by|>`auto`, minibatches/s|>`1f1b`|>ratio", lines)


def gpu_peak(results: Path) -> str:
    """Bandwidth of operators on 2^28 float32 elements, and its share of the published peak."""
    lines = []
    for case in cases(Row.all_of(read(results, ON_GPU)["benchmarks"])):
        mine = fastest(case, "ours")
        if mine is not None and mine.workload == "2^28" and mine.precision == "fp32":
            speed = mine.bytes / (mine.median_us * 1e-6)
            lines.append([mine.operation, f"{speed / 1e12:.2f}", f"{speed / _PEAK:.0%}"])
    return table("operation|>TB/s|>of the peak", sorted(lines))


def gpu_layers(results: Path) -> str:
    """Measured times of models' blocks on one GPU, beside what the CPU needs per instruction."""
    steps = read(results, GPU_STEPS)
    host = steps["host-cost"]["auto"]["result"]["own_cost_us_per_action"]
    lines = []
    for name, case in steps["layers"].items():
        found = case["result"]
        for samples, blocks in zip(found["samples"], found["profiles"], strict=True):
            forwards = [block["forward_seconds"] * 1e6 for block in blocks]
            backwards = [b["seconds"] * 1e6 - f for b, f in zip(blocks, forwards, strict=True)]
            below = sum(min(pair) < host for pair in zip(forwards, backwards, strict=True))
            times = (f"{median(each):.0f}" for each in (forwards, backwards))
            lines.append([name, str(samples), *times, f"{below} of {len(blocks)}"])
    heads = "model|>samples|>forward of a block, us|>backward|>blocks that are too short"
    return table(heads, lines)
