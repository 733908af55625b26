"""Executes what nvcc emits for the kernels, without a GPU: PTX on an interpreted device.

Plans, launch code and nvcc's host stubs are those of the package; runtime.cpp stands for CUDA's
runtime, and machine.cpp for the device. cases.cpp draws calls of every rule with all types, whose
results have to be the CPU's to the bit.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from pathlib import Path

import pytest
from helpers.build_tools import ROOT, TOOLS, run

pytestmark = pytest.mark.compiler

#: Per architecture 28 s of nvcc on one core, as long for the rest; 30 s for the first seeds.
LIMIT_S = 900


def _built(program: str, arch: str = "80") -> Path:
    """Return a program for an architecture; only what has changed is compiled again."""
    if shutil.which("cmake", path=TOOLS) is None:
        pytest.skip("needs cmake")
    folder = ROOT / "build" / f"ptx-{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # another process may build it, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "build.ninja").exists():  # ninja configures again where it must
            options = (f"-DSPECTRAIN_ARCH={arch}", "-G", "Ninja")
            run("cmake", "-S", ROOT / "tests" / "ptx", "-B", folder, *options)
        run("cmake", "--build", folder, "--target", program)
    return folder / program


def _ratio(pattern: str, text: str) -> tuple[int, int]:
    found = re.search(rf"(\d+) of (\d+) {pattern}", text)
    assert found, text
    return int(found[1]), int(found[2])


def _check(arch: str, *options: object) -> str:
    out = run(_built("interpreted", arch), *options)
    assert re.search(r"^[1-9]\d* cases, 0 failed$", out, re.MULTILINE), out
    return out


@pytest.mark.timeout(LIMIT_S)
def test_the_device_notices_mistakes() -> None:
    """Of small kernels: bounds, alignment, races, barriers, memory without values."""
    assert re.search(r"^[1-9]\d* kernels, 0 wrong$", run(_built("faults")))


@pytest.mark.timeout(LIMIT_S)
def test_kernels_write_the_bits_of_the_cpu() -> None:
    """Of the first eight seeds, which have every shape of lists.

    The rest of the instructions belongs to the larger of the two sizes of kernel parameters, and to
    resident tables of types that only the nightly seeds make long.
    """
    out = _check("80", "--seeds", 8)
    launched, kernels = _ratio("kernels", out)
    executed, instructions = _ratio("instructions", out)
    assert launched > 0.7 * kernels and executed > 0.55 * instructions, out


@pytest.mark.timeout(LIMIT_S)
def test_spoiled_instructions_are_noticed() -> None:
    """The rest computes the same: a comparison of what is never equal, a sum with zero."""
    noticed, spoiled = _ratio("spoiled", run(_built("interpreted"), "--seeds", 2, "--spoil", 60))
    assert noticed > 0.7 * spoiled


@pytest.mark.nightly
@pytest.mark.timeout(4 * LIMIT_S)
def test_all_kernels_with_all_shapes() -> None:
    out = _check("80", "--first", 8, "--seeds", 40)
    launched, kernels = _ratio("kernels", out)
    executed, instructions = _ratio("instructions", out)
    assert launched == kernels and executed > 0.85 * instructions, out


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("arch", ["75", "90", "100", "120"])
def test_other_architectures(arch: str) -> None:
    _check(arch, "--seeds", 8)
