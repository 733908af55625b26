"""The generated section of docs/benchmarks.md: a run of `spectrain bench` on a CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rivals import targets
from rivals.report import Report, compact, host_table

#: The folder of the run that --compare and the document use.
BASELINE = "2026-11-22-amd-epyc-25-17"


def section(results: Path) -> str:
    """Targets, operators and host time of the baseline."""
    return written(Report.load(results / BASELINE / "bench.json"), BASELINE)


def written(report: Report, folder: str) -> str:
    """The section of one run."""
    about = report.environment
    machine = (
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} thread(s) used, "
        f"{about['instruction_set']}; Python {about['python']}, torch {about['torch']}, "
        f"spectrain_ext {about['spectrain_ext']}; {about['date'][:10]}."
    )
    shared = (
        f"The machine was shared: load {about['load_before']} before the run."
        if about.get("load_before", 0.0) > 0.5
        else ""
    )
    parts = [
        f"{machine} {shared}".rstrip(),
        "### What was to be reached",
        "Figures that were set before anything was measured: how many times faster than a rival, "
        "which share of the best copy of as many bytes, how long a call may take the host. The "
        "worst of the large tensors decides, those of 2^24 elements and more.",
        targets.markdown(targets.verdicts(report)),
        "### Operators",
        compact(report.cases().values()),
        "### Host time",
        host_table(report.host_us),
        f"![Bandwidth over size, and shares of the best copy](../bench/results/{folder}/bench.png)",
        f"All rows, with every rival: [bench.json](../bench/results/{folder}/bench.json), and as "
        "tables `bench.md` beside it.",
    ]
    if report.left_out:
        why = Counter(line.rpartition(": ")[2] for line in report.left_out)
        reasons = ", ".join(f"{reason} ({count} cases)" for reason, count in why.items())
        parts.append(f"Left out of the run, and named in its JSON: {reasons}.")
    return "\n\n".join(parts)
