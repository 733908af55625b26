"""What a run of bench_operators.py says, and the generated section of docs/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from table import table

from . import targets
from .rows import Row, cases, fastest, share

#: The folder of the run that the document uses.
BASELINE = "2026-11-23-operators"


def compact(rows: Iterable[Row]) -> str:
    """A table of one line per case: ours, its share of the copy, the fastest rival."""
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
    """Three digits, more where the number has them before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def host_us(benchmarks: Iterable[dict[str, Any]]) -> dict[str, float]:
    """What calls on empty tensors cost the host, of a run of bench_host.py."""
    chosen = [each for each in benchmarks if each["extra_info"].get("host")]
    return {each["extra_info"]["name"]: each["stats"]["median"] * 1e6 for each in chosen}


def host_table(found: dict[str, float]) -> str:
    return table("call|>host us", [[name, f"{us:.2f}"] for name, us in found.items()])


def judged(about: dict[str, Any], benchmarks: Sequence[dict[str, Any]]) -> list[targets.Verdict]:
    """The targets of a run's device."""
    rows = [Row.of(each) for each in benchmarks if "operation" in each["extra_info"]]
    return targets.verdicts(about["device"] == "cpu", cases(rows), host_us(benchmarks))


def section(results: Path) -> str:
    """Targets, operators and host time of the baseline."""
    document = json.loads((results / BASELINE / "bench.json").read_text())
    return written(document, f"../bench/results/{BASELINE}/bench.json")


def written(document: dict[str, Any], file: str) -> str:
    """The section of one run."""
    about, benchmarks = document["machine_info"], document["benchmarks"]
    machine = (
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} thread(s) used, "
        f"{about['instruction_set']}; Python {about['python']}, torch {about['torch']}, "
        f"spectrain_ext {about['spectrain_ext']}; {document['datetime'][:10]}."
    )
    busy = about.get("load_before", 0.0)
    shared = f"The machine was shared: load {busy} before the run." if busy > 0.5 else ""
    rows = [Row.of(each) for each in benchmarks if "operation" in each["extra_info"]]
    return "\n\n".join(
        [
            f"{machine} {shared}".rstrip(),
            "### What was to be reached",
            "Figures that were set before anything was measured: how many times faster than a "
            "rival, which share of the best copy of as many bytes, how long a call may take the "
            "host. The worst of the large tensors decides, those of 2^24 elements and more.",
            targets.markdown(judged(about, benchmarks)),
            "### Operators",
            compact(rows),
            "### Host time",
            host_table(host_us(benchmarks)),
            f"Every rival, and every figure of a call on empty tensors: [bench.json]({file}).",
        ]
    )
