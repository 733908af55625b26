"""Tests the native code without Python: C++ tests under sanitizers, and the compiled code."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest
from helpers.build_tools import ROOT, run

pytestmark = pytest.mark.compiler


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sanitizers", "tests"),
    [
        ("address", "spectrain_cuda_tests"),
        # every instruction set takes twice the time, and looking for undefined behaviour twice that
        pytest.param("address,undefined", "spectrain_tests", marks=pytest.mark.nightly),
    ],
)
def test_the_native_half_under_sanitizers(sanitizers: str, tests: str, tmp_path: Path) -> None:
    """The CUDA sources run on a stand-in for the runtime (cpp/stand_in), late and in any order.

    Its plans, streams, graphs and failed calls in float32. All tests: every CPU instruction set and
    every CUDA kernel write the same bits, too.
    """
    options = ("-DSPECTRAIN_CUDA=OFF", "-DSPECTRAIN_TESTS=ON", f"-DSPECTRAIN_SANITIZE={sanitizers}")
    assert "CPU only" in run("cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *options)
    run("cmake", "--build", tmp_path, "--target", tests)
    built = () if tests == "spectrain_tests" else ("--exclude-regex", "^test_kernels")
    out = run("ctest", "--test-dir", tmp_path, "--output-on-failure", "--parallel", "2", *built)
    assert re.search(r"100% tests passed,? .*out of [1-9]", out), out


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction set units are x86-64 only")
@pytest.mark.parametrize("isa", ["v3", "v4"])
def test_vector_units_call_nothing_and_leave_nothing_behind(isa: str, tmp_path: Path) -> None:
    """No fma() library call (6.5 ns per element), and no function that another unit can link."""
    version = "".join(map(str, sys.version_info[:2]))
    name = f"CMakeFiles/spectrain_cpu_{isa}.dir/csrc/kernels/cpu/kernels.cpp.o"
    unit = next(ROOT.glob(f"build/temp.*-cpython-{version}/cmake/{name}"), None)
    if unit is None:  # installed from elsewhere
        options = ("-DSPECTRAIN_CUDA=OFF", "-DSPECTRAIN_TESTS=OFF")
        run("cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *options)
        run("cmake", "--build", tmp_path, "--target", f"spectrain_cpu_{isa}")
        unit = tmp_path / name
    symbols = run("nm", unit)
    assert f"find_kernel_{isa}" in symbols
    assert not re.findall(r" U fmaf?\b", symbols)
    assert not re.findall(r"^.* [WVuw] .*$", symbols, re.MULTILINE)
