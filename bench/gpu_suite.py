"""Runs all measurements that need one or several GPUs, the most important first.

    make gpu-wheel                                     # beforehand, where there is a network
    python bench/gpu_suite.py --out runs/gpu           # at most ten minutes, at most eight files
    python bench/gpu_suite.py --out runs/x --only ranks training # two steps, after their needs
    python bench/gpu_suite.py --out runs/x --dry-run   # the plan, on any machine
    python bench/gpu_suite.py --out runs/x --rehearse  # all of it, tiny and on the CPU

If a tool is missing or fails, the suite records its output and continues. Results reach the folder
within two seconds of their measurement, even if the suite is killed later. All figures in tables
were measured in the same run; missing measurements are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu import machine
from gpu.cases import Cases
from gpu.plan import SUITE, TOTAL_S, plan
from gpu.results import Results, clean
from gpu.scale import FULL, REHEARSAL, ROOT, Scale
from gpu.steps import Outcome, run_group

HERE = Path(__file__).resolve().parent

#: Seconds after which a case counts as hung, for parts with their own process.
CASE_S = 120.0
#: Modules of the parts in gpu/. A part's module is imported only where it runs, so that an import
#: error affects no other part.
PARTS = {
    "install": "install.install",
    "first": "first.first",
    "devices": "devices.devices",
    "ranks": "ranks.ranks",
    "tests": "cuda_tests.run_tests",
    "kernels": "kernels.kernels",
    "stress-methods": "stress.stress_methods",
    "stress-options": "stress.stress_options",
    "training": "training.training",
    "operators": "operators.run_operators",
    "host-cost": "host_cost.host_cost",
    "layers": "layers.layers",
    "overlap": "overlap.traced",
}


def run_part(name: str, record: str, work: Path, until: float, scale: Scale, tests: Path) -> int:
    """Run a part in this process; return 1 if one of its cases failed."""
    light = name in ("install", "kernels", "tests")
    alive = (lambda: None) if light else scale.wait
    limit = CASE_S if scale.on_gpu and not light else 0.0
    cases = Cases(work / f"{record}.json", until, alive, limit)
    if not light:
        import torch

        torch.set_num_threads(1)
    module, _, function = PARTS[name].partition(".")
    part: Callable[..., None] = getattr(importlib.import_module(f"gpu.{module}"), function)
    given: dict[str, tuple[object, ...]] = {
        "tests": (scale, tests, work),
        **dict.fromkeys(("install", "kernels", "overlap"), (scale, work)),
    }
    part(cases, *given.get(name, (scale,)))
    return int(any(case["status"] in ("failed", "died") for case in cases.data.values()))


def suite(
    out: Path, total_s: float, dry: bool, rehearses: bool, tests: Path, only: Sequence[str] = ()
) -> int:
    """Run the plan; return 0 if tests and sanitizers found no errors."""
    begun = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        print(f"--out: expected an empty folder, {out} holds files", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _prepare_environment(work)
        options = ["--tests", str(tests), *(["--rehearse"] if rehearses else [])]
        gpus = REHEARSAL.stand_ins if rehearses else max(1, machine.gpus())
        groups = plan(work, options, total_s, gpus, only)
        unknown = set(only) - {step.name for group in groups for step in group}
        if unknown:
            print(f"--only: expected steps of --dry-run, got {sorted(unknown)}", file=sys.stderr)
            return 2
        results = Results(out, work, machine.environment(), dry)
        results.steps = [step for group in groups for step in group]
        planned, why = 0.0, "dry run" if dry else ""
        try:
            for group in groups:
                planned += max(step.limit_s for step in group)
                for step in group:
                    if step.gpus > gpus:
                        detail = f"it needs {step.gpus} GPUs, and {gpus} can be used"
                        results.outcomes.append(Outcome(step.name, "skipped", detail=detail))
                group = [step for step in group if step.gpus <= gpus]
                if not group:
                    continue
                names = " | ".join(step.name for step in group)
                if why:
                    for step in group:
                        results.outcomes.append(Outcome(step.name, "not run", detail=why))
                        print(f"{step.name}, {step.limit_s:.0f} s: {' '.join(step.command)}")
                    continue
                limit = max(step.limit_s + step.patience_s for step in group)
                # Later groups may use the time that earlier ones saved.
                ends = max(begun + planned, time.monotonic() + limit)
                # A rehearsal on a slow machine still runs everything.
                ends = begun + total_s if rehearses else min(ends, begun + total_s)
                inside = _inside if rehearses else None
                done = run_group(group, results.log_of, HERE, ends, results.publish, inside)
                results.outcomes += done
                if group[0].name == "install":
                    _ask_torch(results)
                results.summarize()
                told = ", ".join(f"{o.status} in {o.seconds:.0f} s" for o in done)
                print(f"[{time.monotonic() - begun:.0f} s] {names}: {told}", flush=True)
                if not rehearses:
                    gpus = results.environment["gpu"]["count"]
                if any(s.essential and o.status != "ok" for s, o in zip(group, done, strict=True)):
                    why = f"{group[0].name} failed"
                elif not results.environment["gpu"]["count"] and not rehearses:
                    why = "torch.cuda.is_available() is false"
        finally:
            print(results.summarize().partition("\n## Tests")[0])
        if dry:
            return 0
        return 0 if clean(results.outcomes) else 1


def _prepare_environment(work: Path) -> None:
    """Set up the environment of all child processes: the package's path and writable caches."""
    found = [str(work / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in found if path)
    os.environ["PYTHONUNBUFFERED"] = "1"
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUPY_CACHE_DIR"):
        os.environ[name] = str(work / name.lower())
    # Reproducible with any stream order: cuBLAS guarantees it only with a workspace per stream.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tools = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), f"{tools}/bin"])


def _ask_torch(results: Results) -> None:
    """Store the device's properties that only torch knows."""
    sys.path.insert(1, str(results.work / "site"))
    try:
        results.environment["gpu"] = machine.gpu()
    except Exception as error:
        results.environment["gpu"] = {"error": f"{type(error).__name__}: {error}", "count": 0}


def _inside(command: list[str], log: Path) -> int | None:
    """Run a part's command in this process: a rehearsal need not import torch a dozen times."""
    if command[:2] != [sys.executable, str(SUITE)]:
        return None
    with open(log, "a") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return main(command[2:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="an empty folder for the results")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="seconds for everything")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, measure nothing")
    parser.add_argument("--rehearse", action="store_true", help="all of it, tiny and on the CPU")
    parser.add_argument("--only", nargs="+", default=(), metavar="STEP", help="only these steps")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of the tests")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    given: Any = parser.parse_args(argv)
    out, tests = given.out.resolve(), given.tests.resolve()
    if given.part is None:
        return suite(out, given.seconds, given.dry_run, given.rehearse, tests, given.only)
    scale = REHEARSAL if given.rehearse else FULL
    return run_part(given.part, given.record or given.part, out, given.until, scale, tests)


if __name__ == "__main__":
    # So that its child processes end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
