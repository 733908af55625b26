"""Builds and runs probe.cu, which compares launch policies on this device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from .carried import FOLDER, carried
from .cases import Cases
from .scale import ROOT, Scale

SOURCE = ROOT / "bench" / "gpu" / "probe.cu"


def build(target: Path, arch: str = "sm_90") -> str:
    """Compile it, without its own access functions if body.h has changed too much for them."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    command = [nvcc, "-std=c++17", f"-arch={arch}", "-fmad=false", f"-I{ROOT / 'csrc'}"]
    said = ""
    for packs in (1, 0):
        more = [f"-DPROBE_OWN_PACKS={packs}", "-o", str(target), str(SOURCE)]
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        if done.returncode == 0:
            return "compiled" if packs else f"compiled without its own accesses: {said[-500:]}"
        said = done.stdout + done.stderr
    raise RuntimeError(f"nvcc: {said[-2000:]}")


def prepare(cases: Cases, out: Path, arch: str = "sm_90") -> None:
    """Use the prebuilt program, or compile it here."""
    target = out / "probe"

    def make() -> str:
        try:
            shutil.copy(carried("probe"), target)
        except FileNotFoundError as error:
            return f"{build(target, arch)}; {error}"
        target.chmod(0o755)
        return "carried along"

    cases.run("build", make)


def run(cases: Cases, scale: Scale, out: Path) -> None:
    """Run a case per choice that the program prints."""
    program = out / "probe"
    if not program.exists():
        cases.put("probe", "failed", error="it was neither carried along nor compiled")
        return
    arguments = [str(program), str(scale.large[0]), "11" if scale.on_gpu else "1"]
    child = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out
    )
    assert child.stdout is not None
    rows: list[dict[str, Any]] = []
    status: dict[str, Any] = {}
    for line in child.stdout:
        print(line, end="", flush=True)
        try:
            rows.append(json.loads(line))
        except ValueError:
            status.setdefault("said", line.strip()[:500])
        cases.put("probe", "running", result={"rows": rows})
        if time.time() > cases.until:
            status["ended"] = "no time left"
            child.kill()
    code = child.wait()
    errors = [row for row in rows if "error" in row]
    good = code == 0 and not errors
    cases.put("probe", "ok" if good else "failed", result={"rows": rows}, code=code, **status)


if __name__ == "__main__":  # python -m gpu.probe, from bench/
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(build(FOLDER / "probe", os.environ.get("PROBE_ARCH", "sm_90")))
