"""Lists the steps in order of importance, because time may run out."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from .kernels import PROGRAM, SEEDS
from .scale import ROOT
from .steps import Step

SUITE = ROOT / "bench" / "gpu_suite.py"
#: Sum of the limits in `plan`, in seconds.
TOTAL_S = 570.0


def plan(
    work: Path,
    options: list[str],
    total_s: float = TOTAL_S,
    gpus: int = 1,
    only: Collection[str] = (),
) -> list[list[Step]]:
    """Return groups of steps that run side by side, one group after the other.

    Steps that need more GPUs than available remain, without any time. `only` limits the plan to
    these steps and those that all others need.
    """

    def part(name: str, limit_s: float, record: str = "", gpus: int = 1) -> Step:
        command = [sys.executable, str(SUITE), "--out", str(work), "--part", name, *options]
        command += ["--record", record or name, "--until", "{until}"]
        return Step(record or name, command, limit_s, gpus=gpus)

    def sanitizer(tool: str, limit_s: float) -> Step:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "17"]
        # The program stops by itself, because a tool that is ended says nothing.
        command += [str(work / PROGRAM), "0", str(SEEDS), "{until}"]
        return Step(tool, command, limit_s, needs="compute-sanitizer")

    install = part("install", 20)
    install.essential, install.patience_s = True, 240.0  # to compile, if no wheel fits
    kernels = part("kernels", 30)
    kernels.patience_s = 120.0  # to compile
    groups = [
        [install],
        [part("first", 30)],
        [kernels],
        [part("devices", 30, gpus=2)],
        [part("ranks", 100 if gpus > 1 else 30)],
        [part("tests", 130), sanitizer("memcheck", 130), sanitizer("synccheck", 130)],
        [part("stress-methods", 100), part("stress-options", 100)],
        [part("training", 45)],
        [part("operators", 90)],
        [part("host-cost", 60)],
        [part("layers", 15)],
        [part("overlap", 25)],
        [sanitizer("racecheck", 20), sanitizer("initcheck", 20)],
    ]
    if only:
        chosen = {"install", "first", *only}
        groups = [[step for step in group if step.name in chosen] for group in groups]
        groups = [group for group in groups if group]
    for group in groups:
        for step in group:
            step.limit_s *= step.gpus <= gpus
    planned = sum(max(step.limit_s for step in group) for group in groups)
    for group in groups:
        for step in group:
            step.limit_s *= total_s / planned
    return groups
