"""Runs every kernel with all types on drawn lists, against the CPU's bits, without Python or torch.

The program of tests/ptx draws the calls. The sanitizers run it too: it allocates every array by
itself, and a tool starts with it in a second.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from .carried import carried
from .cases import Cases
from .install import run
from .scale import ROOT, Scale

#: The name of the program, in the suite's working folder.
PROGRAM = "on_gpu"
#: The first seeds have every shape of lists.
SEEDS = 8


def kernels(cases: Cases, scale: Scale, out: Path) -> None:
    """Provide the program, carried along or compiled here, and run it."""
    if not scale.on_gpu:  # it needs CUDA's driver
        cases.put("program", "passed over")
        return

    def provided() -> dict[str, Any]:
        try:
            shutil.copy(carried(PROGRAM), out / PROGRAM)
            (out / PROGRAM).chmod(0o755)
            return {"from": "carried along"}
        except FileNotFoundError as error:
            _compile(out)
            return {"from": "source", "because": str(error)}

    if cases.run("program", provided) is not None:
        cases.run(f"seeds 0 to {SEEDS - 1}", lambda: _run(out / PROGRAM, cases.until))


def _compile(out: Path) -> None:
    import torch

    code = "{}{}".format(*torch.cuda.get_device_capability())
    folder = out / "cases"
    options = [f"-DSPECTRAIN_ARCH={code}", f"-DSPECTRAIN_CODE=arch=compute_{code},code=sm_{code}"]
    build = ["cmake", "--build", str(folder), "--target", PROGRAM, "--parallel"]
    run(["cmake", "-S", str(ROOT / "tests" / "ptx"), "-B", str(folder), *options])
    run(build)
    shutil.copy(folder / PROGRAM, out / PROGRAM)


def _run(program: Path, until: float) -> dict[str, Any]:
    text = run([str(program), "0", str(SEEDS), str(until)])
    found = re.search(r"(\d+) of (\d+) cases, 0 failed", text)
    assert found, text
    return {"cases": int(found[1]), "of": int(found[2]), "bits": "the CPU's"}
