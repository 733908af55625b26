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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SANITIZERS = ["memcheck", "racecheck", "initcheck", "synccheck"]
#: Only this package's kernels are looked at: what torch leaves uninitialized is its own business.
KERNELS = "spectrain"
#: Where the parts measure; a test rehearses them on the CPU.
DEVICE = "cuda"


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
        Step("operators", [*me, "--part", "operators"], "parts.log", 120 * share),
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


# --- measuring ----------------------------------------------------------------------------------


def sets_needed(nbytes: int, l2_bytes: int, free_bytes: int) -> int:
    """How many sets of buffers to rotate so that none is in the L2 cache when its turn comes."""
    wanted = max(2, -(-4 * l2_bytes // max(1, nbytes)) + 1)
    return max(1, min(wanted, int(0.6 * free_bytes) // max(1, nbytes), 64))


def time_on_gpu(calls: Sequence[Callable[[], object]], *, repeat: int, per: int) -> list[float]:
    """Seconds per call from CUDA events, ``per`` calls between two events, taking turns."""
    import torch

    turn = 0
    for call in calls:
        call()
    torch.cuda.synchronize()
    events = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(per):
            calls[turn % len(calls)]()
            turn += 1
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 / per for a, b in events]


def part_operators(out: Path, budget_s: float) -> None:
    """Every operator and its rivals, with rotating buffers larger than the L2 cache."""
    import torch
    from cases import SIXTEEN_BIT, TRAFFIC, WORKLOADS, build, bytes_moved, copies, implementations
    from table import as_json, summarize

    end = time.monotonic() + budget_s
    p = torch.cuda.get_device_properties(0)
    l2 = getattr(p, "L2_cache_size", 0) or 2**26
    free, _ = torch.cuda.mem_get_info()
    ceiling, source = 0.0, ""
    elements = min(2**28, free // 32)
    for name, call in copies(elements, DEVICE).items():
        times = sorted(time_on_gpu([call], repeat=20, per=1))
        rate = 8 * elements / times[len(times) // 2] / 1e9
        if rate > ceiling:
            ceiling, source = rate, name
    rows, left_out = [], []
    for work in [*WORKLOADS, SIXTEEN_BIT]:
        torch.cuda.empty_cache()
        one = build(work, DEVICE)
        free, _ = torch.cuda.mem_get_info()
        count = sets_needed(one.nbytes, l2, free + one.nbytes)
        sets = [one, *(build(work, DEVICE) for _ in range(count - 1))]
        for operator in TRAFFIC:
            if time.monotonic() > end:
                left_out.append(f"{operator}, {work.name}: no time left")
                continue
            tables = [implementations(operator, s) for s in sets]
            for name in tables[0]:
                per = 1 if work.elements > 2**22 else 10
                times = time_on_gpu([t[name] for t in tables], repeat=40, per=per)
                group = f"{operator}, {work.name}"
                rows.append(summarize(group, name, times, bytes_moved(operator, work), ceiling))
        del one, sets
    data = {
        "rows": as_json(rows),
        "best_copy_gb_per_s": ceiling,
        "best_copy": source,
        "left_out": left_out,
        "how": "CUDA events; buffers rotate so that four times the L2 cache lies between two uses",
    }
    (out / "operators.json").write_text(json.dumps(data, indent=1))


def part_pipeline(out: Path) -> None:
    """Four stages on one GPU: the host's own cost per action, with no GPU work worth mentioning."""
    import bench_pipeline as bp
    import torch
    from table import as_json, summarize

    import spectrain_ext as st

    rows, costs = [], {}
    width = 16
    batches = bp.make_batches(width, DEVICE)

    def times(call: Callable[[], object]) -> list[float]:
        for _ in range(3):
            call()
        seconds = []
        for _ in range(15):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)

    group = f"{bp.STAGES} stages on one GPU, width {width}, {bp.MINIBATCHES} minibatches"
    stages = bp.make_stages(width, DEVICE)
    base = times(lambda: bp.modules_only(stages, batches))
    rows.append(summarize(group, "modules", base))
    for method in st.methods():
        pipe = bp.make_pipeline(bp.make_stages(width, DEVICE), method, devices=[DEVICE] * bp.STAGES)
        got = times(lambda pipe=pipe: bp.run(pipe, batches))  # type: ignore[misc]
        rows.append(summarize(group, f"pipeline, {method}", got))
        middle = len(got) // 2
        costs[method] = (got[middle] - base[len(base) // 2]) / bp.ACTIONS * 1e6
        pipe.release()
    data = {"rows": as_json(rows), "own_cost_us_per_action": costs, "actions": bp.ACTIONS}
    (out / "pipeline.json").write_text(json.dumps(data, indent=1))


def part_small() -> None:
    """Every kernel once, on sizes and alignments that walk its tails: for the sanitizers."""
    import torch

    import spectrain_ext as st

    torch.manual_seed(0)
    pairs = [(d, d) for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)]
    pairs += [(torch.float16, torch.float32), (torch.bfloat16, torch.float32)]
    sizes = [1, 3, 8, 257, 4095, 4096, 4097, 20011]
    for wt, vt in pairs:
        for offset in (0, 1):

            def stream(dtype: torch.dtype, shift: int = offset) -> list[torch.Tensor]:
                return [torch.randn(n + shift, device=DEVICE).to(dtype)[shift:] for n in sizes]

            w, g, kept, out0, out1 = (stream(wt) for _ in range(5))
            v = stream(vt, 0)
            plan_ = st.Plan(w, momentum_buffers=v, grads=g, stashed=kept, outs=[out0, out1])
            plan_.predict(lr=0.1, steps=2.0)
            plan_.predict_(lr=0.1, steps=2.0)
            plan_.stash_predict_(lr=0.1, steps=2.0)
            plan_.swap_()
            plan_.restore_()
            plan_.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0, 0.0])
            plan_.sgd_step_(lr=0.1, momentum=0.0, weight_decay=0.1)
    many = [[torch.randn(7, device=DEVICE) for _ in range(3000)] for _ in range(2)]
    st.predict_(many[0], many[1], lr=0.1, steps=1.0)
    torch.cuda.synchronize()
    print("every kernel ran")


# --- the report ---------------------------------------------------------------------------------


def report(environment_: dict[str, Any], outcomes: Sequence[Outcome], out: Path) -> str:
    """summary.md: what ran, and tables of what operators.json and pipeline.json really hold."""
    from table import Row, markdown

    device = environment_.get("device", {}).get("name", "no GPU")
    lines = [f"# {device}, {environment_['date']}", ""]
    for key in ("torch", "torch_cuda", "spectrain_ext", "nvidia-smi", "nvcc", "git"):
        lines.append(f"- {key}: {environment_.get(key)}")
    lines += ["", "| step | status | seconds | found |", "|---|---|--:|---|"]
    for o in outcomes:
        found = ", ".join(f"{v} {k}" for k, v in o.facts.items())
        lines.append(f"| {o.name} | {o.status} | {o.seconds:.0f} | {found} |")
    for name in ("operators", "pipeline"):
        path = out / f"{name}.json"
        if not path.exists():
            lines += ["", f"{name.capitalize()}: not measured."]
            continue
        data = json.loads(path.read_text())
        lines += ["", f"## {name.capitalize()}", "", markdown(Row(**r) for r in data["rows"])]
        if "best_copy" in data:
            rate = data["best_copy_gb_per_s"]
            lines += ["", f"Best copy: {data['best_copy']}, {rate:.0f} GB/s."]
        for method, cost in data.get("own_cost_us_per_action", {}).items():
            lines.append(f"- {method}: {cost:.1f} us of the pipeline's own per action")
        lines += [f"- not measured: {x}" for x in data.get("left_out", [])]
    if environment_.get("devices", 0) < 2:
        lines += ["", "Two GPUs: not measured."]
    return "\n".join(lines) + "\n"


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
    if arguments.part == "operators":
        part_operators(arguments.out, 90 * arguments.seconds / 570)
    elif arguments.part == "pipeline":
        part_pipeline(arguments.out)
    else:
        part_small()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    raise SystemExit(main())
