"""What was built: no torch in it, all architectures the compiler knows, CUDA as asked for."""

from __future__ import annotations

import importlib.machinery
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain_ext import _C

ROOT = Path(__file__).resolve().parent.parent
NATIVE = Path(_C.__file__ or "")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
def test_no_torch_library_and_no_cuda_runtime_is_linked() -> None:
    """The CUDA runtime is static, so that import works where there is no CUDA at all."""
    needed = re.findall(r"NEEDED.*\[(.*?)\]", _run("readelf", "-d", str(NATIVE)))
    assert needed
    assert not [n for n in needed if re.search(r"torch|c10|cudart|libcuda", n)]


def test_build_info_is_complete() -> None:
    info = _C.build_info()
    assert info["openmp"] is True
    assert info["compiler"] and info["version"]
    assert bool(info["cuda_architectures"]) == info["cuda"] == bool(info["cuda_compiler"])
    if platform.machine() == "x86_64":
        assert info["cpu_instruction_set"].startswith("x86-64")


def test_the_module_is_named_for_this_python() -> None:
    assert NATIVE.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))


def _cuda_tool(name: str) -> str | None:
    home = os.environ.get("CUDA_HOME")
    found = shutil.which(name) or (shutil.which(name, path=f"{home}/bin") if home else None)
    return found or shutil.which(name, path="/usr/local/cuda/bin")


@pytest.mark.skipif(not _C.build_info()["cuda"], reason="this build has no CUDA half")
@pytest.mark.skipif(_cuda_tool("cuobjdump") is None, reason="needs cuobjdump (CUDA toolkit)")
class TestCudaHalf:
    """Read out of the native module itself."""

    @staticmethod
    def _dump(*options: str) -> str:
        tool = _cuda_tool("cuobjdump")
        assert tool is not None
        return _run(tool, *options, str(NATIVE))

    def test_what_it_says_it_has_is_there(self) -> None:
        machine = set(re.findall(r"\.(sm_\d+[a-z]?)\.cubin", self._dump("--list-elf")))
        said = set(_C.build_info()["cuda_architectures"])
        assert machine == {a for a in said if a.startswith("sm_")}
        virtual = {a for a in said if a.startswith("compute_")}
        ptx = self._dump("--list-ptx") if virtual else ""
        assert {a.replace("compute_", "sm_") for a in virtual} == set(
            re.findall(r"\.(sm_\d+[a-z]?)\.ptx", ptx)
        )

    def test_no_kernel_spills(self) -> None:
        """On every architecture that was built."""
        usage = self._dump("--dump-resource-usage")
        kernels = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
        assert kernels
        assert not [k for k in kernels if int(k[1]) or int(k[2])]


def _known_architectures() -> list[int]:
    nvcc = _cuda_tool("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    known = [a for a in _run(nvcc, "--list-gpu-code").split() if re.fullmatch(r"sm_\d+", a)]
    return sorted(int(a[3:]) for a in known if int(a[3:]) >= 75)


@pytest.mark.skipif(not _C.build_info()["cuda"], reason="this build has no CUDA half")
@pytest.mark.skipif("TORCH_CUDA_ARCH_LIST" in os.environ, reason="TORCH_CUDA_ARCH_LIST is set")
@pytest.mark.skipif(
    os.environ.get("SPECTRAIN_TEST_INSTALLED") != "1",
    reason="an in-place build may be narrowed; the installed one is checked",
)
def test_every_architecture_the_compiler_knows_was_built() -> None:
    known = _known_architectures()
    built = set(_C.build_info()["cuda_architectures"])
    assert {f"sm_{a}" for a in known} <= built
    assert f"compute_{max(known)}" in built


@pytest.mark.nightly
@pytest.mark.parametrize("source", sorted(p.name for p in (ROOT / "csrc" / "cuda").glob("*.cu")))
def test_no_spills_on_any_architecture(source: str, tmp_path: Path) -> None:
    known = _known_architectures()
    nvcc = _cuda_tool("nvcc")
    assert nvcc is not None
    command = [nvcc, "-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v", "--threads", "2", "-c"]
    command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in known]
    command += [str(ROOT / "csrc" / "cuda" / source), "-o", str(tmp_path / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert {int(a) for a in re.findall(r"for 'sm_(\d+)'", log)} == set(known)
    figures = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", log)
    assert figures and set(figures) == {("0", "0", "0")}, log


def _configure(
    build: Path, choice: str, *, hide_compiler: bool
) -> subprocess.CompletedProcess[str]:
    """CMake's configuration alone, with or without a CUDA compiler to be found."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if shutil.which("cmake", path=tools) is None or shutil.which("ninja", path=tools) is None:
        pytest.skip("needs cmake and ninja")
    environment = {**os.environ, "PATH": tools}
    command = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    command += ["-DSPECTRAIN_PYTHON=OFF", "-DSPECTRAIN_TESTS=OFF", f"-DSPECTRAIN_CUDA={choice}"]
    if hide_compiler:
        for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
            environment.pop(name, None)
        places = [*tools.split(os.pathsep), "/usr/local/bin", "/usr/bin", "/usr/local/cuda/bin"]
        hidden = [str(Path(d)) for d in places if (Path(d) / "nvcc").exists()]
        if str(Path(sys.executable).parent) in hidden:
            pytest.skip("the CUDA compiler lies beside Python")
        command.append(f"-DCMAKE_IGNORE_PATH={';'.join(dict.fromkeys(hidden))}")
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


class TestCudaIsAChoice:
    """SPECTRAIN_CUDA, as setup.py hands it on."""

    def test_left_out(self, tmp_path: Path) -> None:
        done = _configure(tmp_path, "OFF", hide_compiler=False)
        assert done.returncode == 0, done.stderr
        assert "CPU only" in done.stdout

    def test_no_compiler_is_said_in_one_line(self, tmp_path: Path) -> None:
        done = _configure(tmp_path, "AUTO", hide_compiler=True)
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"^.*CPU only.*nvcc.*$", done.stdout, re.M)) == 1

    def test_insisting_without_a_compiler_names_the_remedy(self, tmp_path: Path) -> None:
        done = _configure(tmp_path, "ON", hide_compiler=True)
        assert done.returncode != 0
        assert "nvcc" in done.stderr and "CUDA_HOME" in done.stderr

    def test_another_word_is_refused(self) -> None:
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext"],
            cwd=ROOT,
            env={**os.environ, "SPECTRAIN_CUDA": "maybe"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        if "No module named 'setuptools'" in done.stderr:
            pytest.skip("needs setuptools")
        assert done.returncode != 0
        assert "SPECTRAIN_CUDA" in done.stderr and "maybe" in done.stderr
