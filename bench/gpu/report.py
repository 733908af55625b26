"""Writes summary.md: what ran, what failed, and tables of the measurements."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from table import table

from .steps import Outcome

Part = dict[str, Any]


def markdown(
    environment: dict[str, Any], outcomes: Sequence[Outcome], parts: dict[str, Part]
) -> str:
    """Return the whole summary. A table that cannot be made is replaced by the reason."""
    device = environment.get("gpu", {}).get("name", "no GPU")
    lines = [f"# {device}, {environment['date']}", ""]
    lines += [f"- {k}: {v}" for k, v in environment.items() if k not in ("date", "gpu")]
    lines += [f"- {k}: {v}" for k, v in environment.get("gpu", {}).items()]
    lines += ["", "| step | status | seconds | found | cases |", "|---|---|--:|---|---|"]
    for o in outcomes:
        found = ", ".join(f"{v} {k}" for k, v in o.facts.items())
        cases = _counted(parts.get(o.name, {}))
        lines.append(f"| {o.name} | {o.status} | {o.seconds:.0f} | {found} | {cases} |")
    lines += ["", "## What failed", "", *(_failed(parts) or ["Nothing that was run."])]
    lines += ["", "## What was not run", "", *(_left_out(outcomes, parts) or ["Nothing."])]
    for title, (name, section) in _SECTIONS.items():
        lines += ["", f"## {title}", ""]
        if name not in parts:
            lines.append(f"{title}: not measured.")
            continue
        try:
            lines += section(parts[name])
        except Exception:  # the other files still have the figures
            lines.append(f"No table: {traceback.format_exc(limit=-2)}")
    if environment.get("gpu", {}).get("count", 0) < 2:
        lines += ["", "Two GPUs: not measured."]
    return "\n".join(lines) + "\n"


def operators_json(found: Part) -> str | None:
    """Return operators.json in pytest-benchmark's format, None if it cannot be made."""
    try:
        from .operators import document_of

        return json.dumps(document_of(found), indent=1)
    except Exception:
        return None


def _counted(part: Part) -> str:
    counts = Counter(case["status"] for case in part.values())
    return ", ".join(f"{n} {status}" for status, n in counts.items())


def _failed(parts: dict[str, Part]) -> list[str]:
    lines = []
    for name, part in parts.items():
        for case, data in part.items():
            if data["status"] not in ("failed", "died"):
                continue
            said = " ".join(str(data.get("error", "")).split())[:400]
            lines.append(f"- {name}, {case}: {data['status']} {said}".rstrip())
            lines += [f"  - {test}" for test in data.get("failed", [])]
    return lines


def _left_out(outcomes: Sequence[Outcome], parts: dict[str, Part]) -> list[str]:
    """Return steps and cases without a result, each with its reason."""
    ended = ("ok", "failed")
    lines = [f"- {o.name}: {o.status}, {o.detail}" for o in outcomes if o.status not in ended]
    lines = [" ".join(line.split())[:400] for line in lines]
    for name, part in parts.items():
        for case, data in part.items():
            if data["status"] in ("skipped", "no time left", "running"):
                why = data.get("error", "")
                lines.append(f"- {name}, {case}: {data['status']} {why}".rstrip())
    return lines


def _tests(part: Part) -> list[str]:
    words = ("passed", "failed", "error", "skipped")
    lines, total = [], Counter[str]()
    for name, case in part.items():
        found = case.get("result") or {}
        total.update({word: found.get(word, 0) for word in words})
        cells = [str(found.get(word, "")) for word in words]
        lines.append([name, case["status"], *cells, f"{found.get('seconds', 0.0):.0f}"])
    lines.append(["all", "", *(str(total[word]) for word in words), ""])
    return [table("|>".join(["file|status", *words, "seconds"]), lines)]


def _operators(part: Part) -> list[str]:
    from rivals import targets
    from rivals.rows import Row, compact

    from .operators import document_of

    measured = document_of(part)
    about, found = measured["machine_info"], measured["benchmarks"]
    host = [[name, f"{us:.2f}"] for name, us in targets.host_us(found).items()]
    lines = ["### Targets", "", targets.markdown(targets.judged(about, found)), "", "### Figures"]
    lines += ["", compact(Row.all_of(found)), "", table("call|>host us", host)]
    return lines + [f"- not measured: {x}" for x in measured["left_out"]]


def _host_cost(part: Part) -> list[str]:
    lines, more = [], []
    for name, found in _results(part):
        if "functions" in found:
            more += ["", f"### {name[:1].upper()}{name[1:]}, us per instruction", ""]
            functions = [[f"`{each}`", f"{us:.1f}"] for each, us in found["functions"].items()]
            more += [table("function > what it calls|>us", functions[:20]), ""]
            calls = [
                [f"`{each}`", f"{of['calls']:.2f}", f"{of['us']:.1f}"]
                for each, of in found["calls"].items()
            ]
            more.append(table("call of CUDA|>calls|>us", calls[:20]))
        elif "median_us" not in found:
            calls = [[each, f"{us:.2f}"] for each, us in found.items()]
            more += ["", table("single call|>us", calls)]
        else:
            own = found.get("own_cost_us_per_action")
            cells = f"{found['median_us'] / 1e3:.2f}", "" if own is None else f"{own:.1f}"
            lines.append([name, *cells])
    return [table("|>median ms|>us of its own per instruction", lines), *more]


def _overlap(part: Part) -> list[str]:
    lines = []
    for name, case in part.items():
        found = case.get("result") or {}
        if not found.get("kernels"):
            lines.append(f"- {name}: no kernel was traced")
            continue
        kinds = ", ".join(f"{k} {us:.0f}" for k, us in found["us_by_kind"].items())
        pairs = ", ".join(f"{k} {share:.1%}" for k, share in found["share_together"].items())
        idle = 1 - found["busy_us"] / found["whole_us"]
        lines.append(
            f"- {name}: of {found['whole_us']:.0f} us the device was idle {idle:.1%}; of the rest "
            f"several streams ran in {found['two_streams_share']:.1%}, several devices in "
            f"{found['two_devices_share']:.1%}; microseconds of each kind: "
            f"{kinds}; two kinds at once: {pairs or 'none'}"
        )
    return lines


def _results(part: Part) -> list[tuple[str, Any]]:
    return [(name, case["result"]) for name, case in part.items() if case["status"] == "ok"]


def _devices(part: Part) -> list[str]:
    lines = []
    for name, found in _results(part):
        if "reaches" in found:
            rows = ["".join("x" if can else "." for can in row) for row in found["reaches"]]
            lines.append(f"- {name}, a row for each device: {' '.join(rows)}")
    pipelines = sum("bits" in found for _, found in _results(part))
    return [*lines, f"- pipelines with the CPU's bits: {pipelines}"]


def _ranks(part: Part) -> list[str]:
    return [
        f"- {name}: as in one process, by {found['backend']} ({', '.join(found['methods'])})"
        for name, found in _results(part)
    ]


def _training(part: Part) -> list[str]:
    lines = []
    for name, found in _results(part):
        speeds = [f"{found[m]['minibatches_per_s']:.3g}" for m in ("auto", "1f1b")]
        ratio = f"{found['auto_over_1f1b']:.3f}"
        lines.append([name, str(found["devices"]), found["backend"], *speeds, ratio])
    written = table("|>devices|by|>auto|>1f1b|>auto / 1f1b", lines)
    return [written, "", "Minibatches per second, medians of rounds in which both took turns."]


_SECTIONS: dict[str, tuple[str, Callable[[Part], list[str]]]] = {
    "Tests": ("tests", _tests),
    "Several GPUs": ("devices", _devices),
    "Processes": ("ranks", _ranks),
    "Training": ("training", _training),
    "Operators": ("operators", _operators),
    "Host": ("host-cost", _host_cost),
    "Overlap": ("overlap", _overlap),
}
