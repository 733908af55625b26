"""The native half without Python: C++ tests under sanitizers, and what the compilers made of it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
# cmake and ninja from the environment that runs the tests, else from the machine.
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
CXX = shutil.which(os.environ.get("CXX", "c++"))
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=os.environ.get("CUDA_HOME", "") + "/bin")


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env={**os.environ, "PATH": TOOLS},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.mark.timeout(900)
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    """Every CPU instruction set, and the CUDA kernels' body thread by thread: the same bits."""
    configure = subprocess.run(
        [
            *("cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja"),
            *("-DSPECTRAIN_CUDA=OFF", "-DSPECTRAIN_TESTS=ON", "-DSPECTRAIN_SANITIZE=ON"),
        ],
        env={**os.environ, "PATH": TOOLS},
        text=True,
        capture_output=True,
    )
    if "GTest" in configure.stderr:
        pytest.skip("needs GoogleTest (Debian: libgtest-dev)")
    assert configure.returncode == 0, configure.stderr
    run("cmake", "--build", tmp_path)
    out = run("ctest", "--test-dir", tmp_path, "--output-on-failure")
    assert re.search(r"100% tests passed,? .*out of [1-9]", out), out


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction set units are x86-64 only")
@pytest.mark.parametrize("isa", ["v3", "v4"])
def test_vector_units_call_nothing_and_leave_nothing_behind(isa: str, tmp_path: Path) -> None:
    """No fma() library call (6.5 ns an element), and no function for another unit to link to."""
    source = (ROOT / "CMakeLists.txt").read_text()
    flags = re.search(rf"set\(flags_{isa} ([^)]*)\)", source)
    assert flags, "CMakeLists.txt no longer names the unit's flags"
    unit = tmp_path / "unit.o"
    run(
        CXX, "-std=c++17", "-O3", *flags.group(1).split(), "-ffp-contract=off", "-fno-math-errno",
        "-fno-trapping-math", "-fopenmp", "-fPIC", f"-DSPECTRAIN_ISA={isa}",
        "-c", CSRC / "cpu" / "kernels.cpp", "-o", unit,
    )  # fmt: skip
    symbols = run("nm", unit)
    assert f"find_kernel_{isa}" in symbols
    assert not re.findall(r" U fmaf?\b", symbols)
    assert not re.findall(r"^.* [WVuw] .*$", symbols, re.MULTILINE)


needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no CUDA compiler (nvcc) on this machine")
CU_FILES = sorted(path.name for path in (CSRC / "cuda").glob("*.cu"))


# Distances read element i by lane i % 256, whatever the alignment: that fixes their bits. What
# prepares a table reads no arrays.
NARROW = ("distance.cu", "prepare.cu")


@needs_nvcc
@pytest.mark.parametrize("source", CU_FILES)
def test_device_code(source: str, tmp_path: Path) -> None:
    """On sm_90: no local memory, 1,024 threads resident (Adam, which divides: 512), and every
    kernel has vector loads and stores, and knows its pointers as global."""
    log = run(
        NVCC, "-std=c++17", "-O3", "-arch=sm_90", "-fmad=false", "-Xptxas", "-v",
        "--keep", "--keep-dir", tmp_path, "-cubin", CSRC / "cuda" / source,
        "-o", tmp_path / "kernel.cubin",
    )  # fmt: skip
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", log)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert len(spills) >= len(registers) > 0  # what is called has none of its own
    assert all(figures == ("0", "0", "0") for figures in spills), log
    assert max(registers) <= (128 if source == "adam.cu" else 64), log
    (ptx,) = tmp_path.glob("*.ptx")
    entries = ptx.read_text().split(".entry ")[1:]
    assert len(entries) == len(registers)
    for entry in entries if source not in NARROW else ():
        name = entry.split("(")[0]
        assert re.search(r"\bld\.global\.v(4\.[ufb]32|2\.[ufb]64)", entry), name
        assert re.search(r"\bst\.global\.v(4\.[ufb]32|2\.[ufb]64)", entry), name
        generic = re.findall(r"\b(?:ld|st)\.(?:v\d\.)?[usfb]\d+\b.*", entry)
        assert not generic, (name, generic)
        assert ".local" not in entry, name
