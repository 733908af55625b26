"""Tables of a run of bench_operators.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from table import table

from . import targets
from .rows import Row, cases, fastest, share

#: The folder of the run in the documents.
BASELINE = "2026-11-23-operators"


def compact(rows: Iterable[Row]) -> str:
    """One line per case: ours, its share of the copy's bandwidth, the fastest rival."""
    lines = []
    for case in cases(rows):
        mine, rival = fastest(case, "ours"), fastest(case, "rival")
        if mine is None:
            continue
        shares = share(mine, case), share(mine, case, best=True)
        cells = [mine.operation, mine.workload, mine.precision, microseconds(mine.median_us)]
        cells += [f"{mine.iqr_us / mine.median_us:.0%}", microseconds(mine.best_us)]
        cells += ["" if each is None else f"{each:.0%}" for each in shares]
        if rival is None:
            cells += ["", "", ""]
        else:
            ratio = f"{rival.median_us / mine.median_us:.2f}"
            cells += [rival.name, microseconds(rival.median_us), ratio]
        lines.append(cells)
    columns = "operation|tensors|types|>ours, us|>IQR|>best|>of copy|>of copy, best"
    return table(f"{columns}|fastest rival|>its us|>times", lines)


def microseconds(value: float) -> str:
    """Show three digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def host_us(benchmarks: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the host time of calls on empty tensors, of a run of bench_host.py."""
    chosen = [each for each in benchmarks if each["extra_info"].get("host")]
    return {each["extra_info"]["name"]: each["stats"]["median"] * 1e6 for each in chosen}


def host_table(found: dict[str, float]) -> str:
    return table("call|>host us", [[name, f"{us:.2f}"] for name, us in found.items()])


def judged(about: dict[str, Any], benchmarks: Sequence[dict[str, Any]]) -> list[targets.Verdict]:
    """Check the targets of a run's device."""
    rows = [Row.of(each) for each in benchmarks if "operation" in each["extra_info"]]
    return targets.verdicts(about["device"] == "cpu", cases(rows), host_us(benchmarks))


def _read(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / BASELINE / "bench.json").read_text())
    return found


def reached(results: Path) -> str:
    """Targets and measured figures."""
    document = _read(results)
    return targets.markdown(judged(document["machine_info"], document["benchmarks"]))


def host(results: Path, name: str) -> str:
    """Host time of the call with this word in its name."""
    (us,) = (us for call, us in host_us(_read(results)["benchmarks"]).items() if name in call)
    return f"{us:.2f} us"


def large(results: Path, operation: str) -> str:
    """How many times as fast as the fastest rival on large float32 tensors: the worst and best."""
    rows = [Row.of(each) for each in _read(results)["benchmarks"] if "bytes" in each["extra_info"]]
    found = []
    for case in cases(rows):
        mine, rival = fastest(case, "ours"), fastest(case, "rival")
        if not (mine and rival) or mine.elements < 2**24 or mine.precision != "fp32":
            continue
        if mine.operation == operation:
            found.append(rival.median_us / mine.median_us)
    return f"{min(found):.2f} to {max(found):.2f} times"


def section(results: Path) -> str:
    """Times of operations, and how many times faster they are than the fastest rival."""
    rows = [
        Row.of(each) for each in _read(results)["benchmarks"] if "operation" in each["extra_info"]
    ]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for case in cases(rows):
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
