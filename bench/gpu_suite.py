"""Everything that needs a GPU, in one go: tests, sanitizers, operators, pipeline, profiler.

    python bench/gpu_suite.py --out runs/gpu            # at most ten minutes, at most eight files
    python bench/gpu_suite.py --out runs/gpu --dry-run  # the plan, on any machine

The package must be importable (installed, or built in place), and pytest and hypothesis installed
for the tests. A tool that is missing or does not work is recorded with what it said, and the suite
goes on. Whatever ends in a table was measured in this very run; what was not measured is left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SANITIZERS = ["memcheck", "racecheck", "initcheck", "synccheck"]
#: Only this package's kernels are looked at: what torch leaves uninitialized is its own business.
KERNELS = "spectrain"


@dataclass
class Step:
    """A command of the suite: its output goes to a file, it may take so long and no longer."""

    name: str
    command: list[str]
    file: str
    limit_s: float
    needs: str | None = None  # a program without which the step is not tried
    unfiltered: list[str] | None = None  # tried where the tool refuses the filter by kernel name


@dataclass
class Outcome:
    """What became of a step."""

    name: str
    status: str  # "ok", "failed", "timed out", "missing", "not run"
    seconds: float = 0.0
    code: int | None = None
    detail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def plan(out: Path, total_s: float) -> list[Step]:
    """The steps in order of importance: what matters most has run when time is up."""
    python = sys.executable
    me = [python, str(HERE / "gpu_suite.py"), "--out", str(out)]
    tests = ["-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", str(ROOT / "tests")]
    share = total_s / 570
    steps = [
        Step("tests", [python, *tests], "tests.txt", 200 * share),
        Step("operators", [*me, "--part", "operators"], "parts.log", 150 * share),
        Step("pipeline", [*me, "--part", "pipeline"], "parts.log", 80 * share),
    ]
    for tool in SANITIZERS:
        start = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "17"]
        small = [*me, "--part", "small"]
        mine = ["--kernel-name", f"kernel_substring={KERNELS}"]
        name = "compute-sanitizer"
        step = Step(tool, [*start, *mine, *small], "sanitizer.txt", 50 * share, name)
        step.unfiltered = [*start, *small]
        steps.append(step)
    ncu = ["ncu", "--clock-control", "none", "--kernel-name", f"regex:{KERNELS}"]
    ncu += ["--launch-count", "12", "--section", "SpeedOfLight", "--section", "LaunchStats"]
    steps.append(Step("ncu", [*ncu, *me, "--part", "small"], "ncu.txt", 60 * share, "ncu"))
    return steps


def run_step(step: Step, out: Path, deadline: float) -> Outcome:
    """Run a step; once more without the filter where the tool gave no verdict with it."""
    outcome = _run_command(step, step.command, out, deadline)
    verdict = outcome.facts.keys() & {"sanitizer_errors", "hazards"}
    if outcome.status == "failed" and step.unfiltered and not verdict:
        outcome = _run_command(step, step.unfiltered, out, deadline)
        outcome.detail = f"without a filter by kernel name\n{outcome.detail}"
    return outcome


def _run_command(step: Step, command: list[str], out: Path, deadline: float) -> Outcome:
    """Run one command in its own session, so that all of it can be ended when its time is up."""
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, "missing", detail=f"{step.needs} is not on PATH")
    left = deadline - time.monotonic()
    if left < 5:
        return Outcome(step.name, "not run", detail="no time left")
    limit = min(step.limit_s, left)
    start = time.monotonic()
    with open(out / step.file, "a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        mark = log.tell()
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=HERE,  # not the root: what is installed is measured, not the source tree
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = None
    seconds = time.monotonic() - start
    text = (out / step.file).read_text(errors="replace")[mark:]
    status = "timed out" if code is None else "ok" if code == 0 else "failed"
    return Outcome(step.name, status, seconds, code, "\n".join(text.splitlines()[-5:]), read(text))


def read(text: str) -> dict[str, Any]:
    """The figures that a tool's last lines give: tests passed, errors found."""
    facts: dict[str, Any] = {}
    for word in ("passed", "failed", "skipped"):
        found = re.findall(rf"\b(\d+) {word}\b", text)
        if found:
            facts[word] = int(found[-1])
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    if summary:
        facts["sanitizer_errors"] = int(summary[-1])
    hazards = re.findall(r"RACECHECK SUMMARY: (\d+) hazard", text)
    if hazards:
        facts["hazards"] = int(hazards[-1])
    return facts


def environment() -> dict[str, Any]:
    """Device, driver, versions, date: without them a figure means nothing."""
    import torch

    info: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
    }
    try:
        import spectrain_ext as st
        from spectrain_ext import _C

        info["spectrain_ext"] = st.__version__
        info["build"] = {k: v for k, v in _C.build_info().items() if k != "version"}
    except ImportError as e:
        info["spectrain_ext"] = f"cannot be imported: {e}"
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        info["device"] = {
            "name": p.name,
            "capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_bytes": p.total_memory,
            "l2_bytes": getattr(p, "L2_cache_size", None),
        }
        info["devices"] = torch.cuda.device_count()
    for tool, arguments in {
        "nvidia-smi": ["--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"],
        "nvcc": ["--version"],
        "compute-sanitizer": ["--version"],
        "ncu": ["--version"],
        "git": ["-C", str(ROOT), "rev-parse", "HEAD"],
    }.items():
        info[tool] = _says(tool, arguments)
    return info


def _says(tool: str, arguments: Sequence[str]) -> str | None:
    if shutil.which(tool) is None:
        return None
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{type(e).__name__}: {e}"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else ""


# --- the report ---------------------------------------------------------------------------------


def report(environment_: dict[str, Any], outcomes: Sequence[Outcome], out: Path) -> str:
    """summary.md: what ran, and tables of what operators.json and pipeline.json really hold."""
    from table import Row, markdown

    from spectrain_ext.benchmark import targets
    from spectrain_ext.benchmark.report import Report, host_table
    from spectrain_ext.benchmark.report import markdown as operators_table

    device = environment_.get("device", {}).get("name", "no GPU")
    lines = [f"# {device}, {environment_['date']}", ""]
    for key in ("torch", "torch_cuda", "spectrain_ext", "nvidia-smi", "nvcc", "git"):
        lines.append(f"- {key}: {environment_.get(key)}")
    lines += ["", "| step | status | seconds | found |", "|---|---|--:|---|"]
    for o in outcomes:
        found = ", ".join(f"{v} {k}" for k, v in o.facts.items())
        lines.append(f"| {o.name} | {o.status} | {o.seconds:.0f} | {found} |")
    if (out / "operators.json").exists():
        measured = Report.load(out / "operators.json")
        lines += ["", "## Targets", "", targets.markdown(targets.verdicts(measured))]
        lines += ["", "## Operators", "", operators_table(measured.rows, copies=True)]
        lines += ["", host_table(measured.host_us)]
        lines += [f"- not measured: {x}" for x in measured.left_out]
    else:
        lines += ["", "Operators: not measured."]
    if (out / "pipeline.json").exists():
        data = json.loads((out / "pipeline.json").read_text())
        lines += ["", "## Pipeline", "", markdown(Row(**r) for r in data["rows"])]
        for method, cost in data.get("own_cost_us_per_action", {}).items():
            lines.append(f"- {method}: {cost:.1f} us of the pipeline's own per action")
    else:
        lines += ["", "Pipeline: not measured."]
    if environment_.get("devices", 0) < 2:
        lines += ["", "Two GPUs: not measured."]
    return "\n".join(lines) + "\n"


def _draw(out: Path) -> str:
    """The picture of operators.json, where the log has left its place among the eight files."""
    from spectrain_ext.benchmark.picture import draw
    from spectrain_ext.benchmark.report import Report

    try:
        draw(out / "operators.svg", Report.load(out / "operators.json"))
    except (ImportError, OSError, ValueError) as error:
        return f"none: {error}"
    return "operators.svg"


def suite(out: Path, total_s: float, dry: bool) -> int:
    """Run the plan; returns 0 when tests and sanitizers found nothing wrong."""
    deadline = time.monotonic() + total_s
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        print(f"--out: expected an empty folder, {out} holds files", file=sys.stderr)
        return 2
    about = environment()
    steps = plan(out, total_s)
    outcomes = []
    usable = about["cuda_available"]
    for step in steps:
        if dry or not usable:
            why = "dry run" if dry else "torch.cuda.is_available() is false"
            outcomes.append(Outcome(step.name, "not run", detail=why))
            print(f"{step.name}: {' '.join(step.command)}  ({why})")
            continue
        outcomes.append(run_step(step, out, deadline))
        print(f"{step.name}: {outcomes[-1].status}, {outcomes[-1].seconds:.0f} s", flush=True)
    summary = {
        "environment": about,
        "dry_run": dry,
        "steps": [{**asdict(s), **asdict(o)} for s, o in zip(steps, outcomes, strict=True)],
    }
    # The parts write JSON; their log is of interest only when something went wrong.
    if all(o.status == "ok" for o in outcomes if o.name in ("operators", "pipeline")):
        (out / "parts.log").unlink(missing_ok=True)
        about["picture"] = _draw(out)
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    text = report(about, outcomes, out)
    (out / "summary.md").write_text(text)
    print(text)
    if dry:
        return 0
    if not usable:
        return 1
    judged = [o for o in outcomes if o.name in ("tests", "operators", "pipeline")]
    clean = all(not o.facts.get(k) for o in outcomes for k in ("sanitizer_errors", "hazards"))
    return 0 if clean and all(o.status == "ok" for o in judged) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="an empty folder for the results")
    parser.add_argument("--seconds", type=float, default=570, help="for everything together")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, measure nothing")
    parser.add_argument(
        "--part", choices=["operators", "pipeline", "small"], help=argparse.SUPPRESS
    )
    arguments = parser.parse_args(argv)
    if arguments.part is None:
        return suite(arguments.out.resolve(), arguments.seconds, arguments.dry_run)
    import gpu_parts

    if arguments.part == "operators":
        gpu_parts.part_operators(arguments.out, 125 * arguments.seconds / 570)
    elif arguments.part == "pipeline":
        gpu_parts.part_pipeline(arguments.out)
    else:
        gpu_parts.part_small()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    raise SystemExit(main())
