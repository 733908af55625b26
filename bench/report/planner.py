"""Section of docs/results.md: planned against real runs; and what the planner knows of quality."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from table import table

from spectrain_ext.extras import picture
from spectrain_ext.method import methods

from .frontier import DEEP, rows_of

#: The runs of bench_plan.py.
FOLDER = "2026-11-22-plan"
#: Those of its option --speeds.
UNEQUAL = "2026-11-25-devices"
#: The study that the planner's qualities come from.
STUDY = "2026-11-22-frontier"
_TARGET = 0.1
_COLORS = {2: "#0072B2", 3: "#E69F00", 4: "#009E73"}  # Okabe and Ito's


def section(results: Path) -> str:
    """Planned over measured periods, of every configuration."""
    document = json.loads((results / FOLDER / "plan.json").read_text())
    rows = _rows(document)
    within = [row for row in rows if abs(row["ratio"] - 1) <= _TARGET]
    shared = any(run["processes"] > run["cores"] for run in document["runs"])
    load = document["load_before"][0]
    parts = [
        "## Planned against real",
        f"""\
`{document["command"]}`, {document["date"][:10]}, torch {document["torch"]}, load {load:.1f} before
it: processes of one machine with {document["runs"][0]["cores"]} cores, one thread each, gloo over
loopback, {document["batch"]} samples a minibatch, {document["rounds"]} rounds
([figures](../bench/results/{FOLDER}/plan.json)). In every round the planner is given layer times
that were **measured** a moment before, with as many processes at once as there are cores, and
**simulates** the period of a minibatch; then that is **measured**. The link was measured before
(`--link measured`), by pipelines of other stages than these. *Ratio* is planned over measured, the
median of the rounds and their range. *Work* is the CPU time of all processes for a minibatch, the
planner's over what was used.""",
        f"**{len(within)} of {len(rows)} configurations are within 10 %**; {_spread(rows)}.",
    ]
    if shared:
        parts.append(
            "Where there are more processes than cores the simulation gives those that compute "
            "equal shares of the cores."
        )
    for run in document["runs"]:
        mine = [row for row in rows if row["processes"] == run["processes"]]
        inside = sum(abs(row["ratio"] - 1) <= _TARGET for row in mine)
        parts += [
            f"{run['processes']} processes, {inside} of {len(mine)} within 10 %; "
            f"{_link(run['link'])}:",
            _table(mine),
        ]
    parts.append(_missed(rows))
    parts.append(
        "![Planned over measured periods: a point for each configuration, the line is equality]"
        "(results-planner.png)"
    )
    if (results / UNEQUAL).exists():
        parts.append(unequal(json.loads((results / UNEQUAL / "plan.json").read_text())))
    return "\n\n".join(part for part in parts if part)


def unequal(document: dict[str, Any]) -> str:
    """Ranks of different speeds: cut for them, and as if they were equal."""
    rows = _rows(document)
    within = sum(abs(row["ratio"] - 1) <= _TARGET for row in rows)
    lines = []
    for row in (row for row in rows if row["fitted"]):
        same = ("model", "method", "microbatches")
        alike = next(
            other
            for other in rows
            if not other["fitted"] and all(other[name] == row[name] for name in same)
        )
        gains = [b / a for a, b in zip(row["measured"], alike["measured"], strict=True)]
        for each, gain in ((row, ""), (alike, f"{median(gains):.2f}")):
            low, high = each["range"]
            lines.append(
                [
                    *(f"`{each['method']}`", each["model"], str(each["microbatches"])),
                    " + ".join(map(str, each["layers"])),
                    *(f"{1e3 * median(each[name]):.1f}" for name in ("planned", "measured")),
                    f"{each['ratio']:.2f} ({low:.2f} to {high:.2f})",
                    *(f"{each['work']:.2f}", gain),
                ]
            )
    speeds = " and ".join(f"{speed:g}" for speed in rows[0]["speeds"])
    heads = "method|blocks|>M|layers|>planned ms|>measured ms|>ratio|>work|>over the other cut"
    return f"""\
### Unequal devices

`{document["command"]}`, {document["date"][:10]}, {document["cpu"]}, torch {document["torch"]}, load
{document["load_before"][0]:.1f} before it, {document["rounds"]} rounds
([figures](../bench/results/{UNEQUAL}/plan.json)): ranks of speeds {speeds}, of which the slow one
computes its layers twice, forward and backward. Models are cut for these speeds, and as if ranks
were equal. **{within} of {len(rows)} configurations are within 10 %**; {_spread(rows)};
{_link(document["runs"][0]["link"])}.

{table(heads, lines)}"""


def _link(link: dict[str, Any]) -> str:
    return (
        f"a message takes {1e6 * link['latency']:.0f} us and {link['bandwidth'] / 1e9:.2f} GB/s, "
        f"and keeps the core of either process busy for {1e6 * link['busy']:.0f} us and "
        f"{link['busy_bandwidth'] / 1e9:.2f} GB/s"
    )


def _rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for run in document["runs"]:
        for row in run["rows"]:
            ratios = [p / m for p, m in zip(row["planned"], row["measured"], strict=True)]
            work = [p / m for p, m in zip(row["planned_work"], row["measured_work"], strict=True)]
            found.append(
                {
                    **row,
                    "processes": run["processes"],
                    "ratio": median(ratios),
                    "range": (min(ratios), max(ratios)),
                    "work": median(work),
                }
            )
    return found


def _spread(rows: list[dict[str, Any]]) -> str:
    off = sorted(abs(row["ratio"] - 1) for row in rows)
    return f"the median miss is {100 * median(off):.0f} %, the largest {100 * off[-1]:.0f} %"


def _table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        low, high = row["range"]
        counts = ", ".join(map(str, row["replicas"]))
        lines.append(
            [
                *(f"`{row['method']}`", row["model"], counts, str(row["microbatches"])),
                *(f"{1e3 * median(row[name]):.1f}" for name in ("planned", "measured")),
                f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
                f"{row['work']:.2f}",
            ]
        )
    heads = "method|blocks|replicas of each stage|>M|>planned ms|>measured ms|>ratio|>work"
    return table(heads, lines)


def _missed(rows: list[dict[str, Any]]) -> str:
    """Which configurations miss, and whether their work or their waiting is what was misjudged."""
    missed = [row for row in rows if abs(row["ratio"] - 1) > _TARGET]
    if not missed:
        return ""
    work = sum(abs(row["work"] - 1) > _TARGET for row in missed)
    low = sum(row["ratio"] < 1 for row in missed)
    return (
        f"Of the {len(missed)} that miss, {low} take longer than planned. In {work} of them the "
        "work itself is misjudged by more than 10 %: times of layers and messages that differ when "
        "the whole pipeline runs; in the rest it is what processes wait for one another."
    )


def draw(results: Path, folder: Path) -> None:
    """Planned over measured."""
    rows = _rows(json.loads((results / FOLDER / "plan.json").read_text()))
    with picture(folder / "results-planner.png", 5.2, 4.6) as figure:
        axes = figure.add_subplot()
        times = [1e3 * median(row[kind]) for row in rows for kind in ("planned", "measured")]
        ends = [0.9 * min(times), 1.1 * max(times)]
        axes.plot(ends, ends, color="black", linewidth=1)
        axes.fill_between(
            ends,
            [(1 - _TARGET) * end for end in ends],
            [(1 + _TARGET) * end for end in ends],
            color="#E9E9E9",
        )
        for processes in sorted({row["processes"] for row in rows}):
            mine = [row for row in rows if row["processes"] == processes]
            axes.plot(
                [1e3 * median(row["measured"]) for row in mine],
                [1e3 * median(row["planned"]) for row in mine],
                "o",
                color=_COLORS.get(processes, "#CC79A7"),
                label=f"{processes} processes",
            )
        axes.set_xlabel("measured, ms of a minibatch")
        axes.set_ylabel("planned (simulated), ms of a minibatch")
        axes.set_title("Grey: within 10 %", fontsize=10)
        axes.legend(frameon=False, fontsize=8)


def quality_data(results: Path) -> dict[str, Any]:
    """What ``spectrain_ext/planning/quality.json`` holds: gaps and updates of known methods."""
    known = set(methods())
    rows = []
    later = rows_of(results, "digits", DEEP)  # of the same study, since ``auto`` changed
    for path in sorted((results / STUDY).glob("*.json")):
        for row in rows_of(results, path.stem):
            if row["contender"] not in known or not row["delay"]:
                continue
            if path.stem == "digits":
                row = next((r for r in later if _same_cell(r, row)), row)
            rows.append(
                {
                    "workload": path.stem,
                    "method": row["contender"],
                    "stages": row["stages"],
                    "microbatches": row["microbatches"],
                    "delay": row["delay"],
                    "seeds": len(row["losses"]),
                    "gap": _rounded(row["gap"]["mean"]),
                    "updates": _rounded(row["updates"]["0.75"]),
                }
            )
    return {"source": f"bench/results/{STUDY}", "rows": rows}


def _same_cell(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row[key] == other[key] for key in ("contender", "stages", "microbatches"))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def factors(results: Path) -> str:
    """Minibatches to an equal loss over synchronous training's, as the planner ranks by them."""
    cells: dict[tuple[int, str], dict[str, list[str]]] = {}
    rows = quality_data(results)["rows"]
    for row in rows:
        found = cells.setdefault((row["delay"], row["method"]), {})
        updates = "not reached" if row["updates"] is None else f"{row['updates']:.2f}"
        found.setdefault(row["workload"], []).append(f"{updates} (N = {row['stages']})")
    workloads = sorted({row["workload"] for row in rows})
    lines = [
        [f"`{method}`", str(delay), *(", ".join(found.get(name, ())) for name in workloads)]
        for (delay, method), found in sorted(cells.items())
    ]
    return table(f"method|>updates late|{'|'.join(workloads)}", lines)


def quality_text(results: Path) -> str:
    """The file itself, a row a line."""
    data = quality_data(results)
    rows = ",\n  ".join(json.dumps(row) for row in data["rows"])
    return f'{{\n "source": {json.dumps(data["source"])},\n "rows": [\n  {rows}\n ]\n}}\n'
