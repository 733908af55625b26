"""Tests the built extension (no torch in it, code for the intended GPUs) and the distributions."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from helpers.build_tools import ROOT, TOOLS

from spectrain_ext import _C

pytestmark = pytest.mark.processes

NATIVE = Path(_C.__file__ or "")


def _try(
    *command: str, timeout: int = 120, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": TOOLS, **environment}
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout
    )


def _run(*command: str, **how: Any) -> str:
    done = _try(*command, **how)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


#: One build serves every torch: no c10::, at:: or torch::, no THP or aoti_ in C.
FOREIGN = r"_Z\w*?(?:3c10|2at|5torch)(?![a-z])|^THP|^(?:aoti_)?torch|^cu(da)?[A-Z]"


def test_the_extension_links_nothing_of_torch_and_exports_its_entry_alone() -> None:
    """An import works without CUDA, whose runtime is static; two copies in a process stay apart."""
    with NATIVE.open("rb") as file:
        elf = ELFFile(file)
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    outside = [s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF"]
    own = [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF"]
    assert "libstdc++.so.6" in needed
    assert not [name for name in needed if re.search("torch|c10|cudart|libcuda", name)]
    examples = ("_ZN3c106Device8validateEv", "_ZNK2at6Tensor3dimEv", "cudaMalloc", "cuInit")
    assert all(re.search(FOREIGN, name) for name in examples)
    assert "PyType_Ready" in outside
    assert not [name for name in outside if re.search(FOREIGN, name)]
    assert "PyInit__C" in own and not [name for name in own if re.match("_ZNK?9spectrain", name)]


def test_build_info_is_complete() -> None:
    info = _C.build_info()
    assert info["openmp"] is True
    assert info["compiler"] and isinstance(info["version"], str)
    assert bool(info["cuda_architectures"]) == info["cuda"] == bool(info["cuda_compiler"])
    assert bool(info["cuda_architectures_why"]) == info["cuda"]
    if platform.machine() == "x86_64":
        assert info["cpu_instruction_set"].startswith("x86-64")


def test_sources_that_are_not_built_say_so(tmp_path: Path) -> None:
    """A native module that cannot be loaded reports why."""
    package = tmp_path / "spectrain_ext"
    shutil.copytree(
        ROOT / "spectrain_ext", package, ignore=shutil.ignore_patterns("_C*", "__pycache__")
    )
    native = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    program = f"""
import importlib, pathlib, sys
for _ in range(2):
    try:
        import spectrain_ext
    except ImportError as error:
        print(error)
    pathlib.Path("spectrain_ext", {native!r}).write_text("no library")
    importlib.invalidate_caches()
"""
    command = [sys.executable, "-c", program]
    unbuilt, broken = _run(*command, folder=tmp_path, PYTHONPATH="").splitlines()
    assert unbuilt.startswith(f"spectrain_ext is not built here: {package} has no native module")
    assert '"pip install ."' in unbuilt
    assert native in broken
    assert "circular" not in broken


def _cuda_tool(name: str) -> str | None:
    """From a toolkit or from NVIDIA's Python packages."""
    folders = [f"{os.environ.get('CUDA_HOME', '')}/bin", "/usr/local/cuda/bin"]
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or ()) if nvidia else ():
        folders += [str(path) for path in Path(folder).glob("*/bin")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


@pytest.mark.skipif(not _C.build_info()["cuda"], reason="this build has no CUDA half")
@pytest.mark.skipif(_cuda_tool("cuobjdump") is None, reason="needs cuobjdump (CUDA toolkit)")
class TestCudaHalf:
    """Properties read from the native module itself."""

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

    def test_no_kernel_spills_or_has_too_many_registers(self) -> None:
        """1,024 threads are resident, 512 of kernels that divide (Adam) and of Lion in float64."""
        usage = self._dump("--dump-resource-usage").split("arch = ")[1:]
        machine = [a for a in _C.build_info()["cuda_architectures"] if a.startswith("sm_")]
        figures = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)"
        found = [(part, *each) for part in usage for each in re.findall(figures, part)]
        assert len(found) >= 150 * len(machine)
        for part, name, registers, stack, local in found:
            assert local == "0" and int(stack) == 0, name
            # on other architectures kernels with blocks of 256 threads may use a few more:
            # distances 66
            if part.startswith("sm_90\n") or re.search("run_table|run_resident", name):
                few = not re.search("Adam|LionStepId", name)
                assert int(registers) <= (64 if few else 128), name

    def test_kernels_read_and_write_vectors_of_global_memory(self) -> None:
        """16 bytes of the widest stream, and as many elements (8 bytes) of 16-bit ones.

        Distances read element i in lane i % 256 at any alignment: that fixes their bits. Kernels
        that prepare a table read no arrays.
        """
        virtual = [a for a in _C.build_info()["cuda_architectures"] if a.startswith("compute_")]
        if not virtual:
            pytest.skip("no PTX was built: TORCH_CUDA_ARCH_LIST names none")
        entries = self._dump("--dump-ptx").split(".entry ")[1:]
        assert len(entries) >= 150
        for entry in entries:
            name = entry.split("(")[0]
            if not re.search("run_table|run_resident", name):
                continue
            whole = r"\.global\.v(4\.[ufb]32|2\.[ufb]64)"
            half = r"\.global\.(v4\.[ufb]16|v2\.[ufb]32)"
            # 16-bit streams beside float32, by the mangled name
            mixed = bool(re.search("Half|BFloat16", name) and re.search("[IE_f]f", name))
            assert re.search(rf"\bld{whole}", entry), name
            assert re.search(rf"\bst{whole}" + (rf"|\bst{half}" if mixed else ""), entry), name
            assert bool(re.search(rf"\b(?:ld|st){half}", entry)) == mixed, name
            generic = re.findall(r"\b(?:ld|st)\.(?:v\d\.)?[usfb]\d+\b.*", entry)
            assert not generic, (name, generic)
            assert ".local" not in entry, name


#: What nvcc of CUDA 13 knows, and of 12.9, which compiles the wheels (Jetson Thor is 10.1 in it).
CUDA_13 = ["compute_70", "sm_70", *(f"sm_{n}" for n in (75, 80, 86, 87, 90, 100, 103, 110, 120))]
CUDA_12_9 = [f"sm_{n}" for n in (50, 52, 60, 70, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)]
MAJOR = "sm_75 sm_80 sm_90 sm_100 sm_120 compute_80"
ALL = "sm_75 sm_80 sm_86 sm_87 sm_90 sm_100 sm_103 sm_110 sm_120 compute_80"
ARM = "sm_75 sm_80 sm_87 sm_90 sm_100 sm_110 sm_120 compute_80"
ARM_12_9 = "sm_75 sm_80 sm_87 sm_90 sm_100 sm_120 compute_80"
_OLD = {"known": CUDA_12_9, "archs": "major"}


@pytest.mark.skipif(shutil.which("cmake", path=TOOLS) is None, reason="needs cmake")
class TestArchitectures:
    """GPUs to build for: only CMake's module, with stand-ins for nvcc and nvidia-smi."""

    @staticmethod
    def _choose(
        folder: Path,
        gpus: str | None,  # None: no driver
        *,
        archs: str = "",
        wanted: str = "",
        arm: bool = False,
        known: Sequence[str] = CUDA_13,  # to the compiler
    ) -> subprocess.CompletedProcess[str]:
        answer = "echo no driver; exit 9" if gpus is None else f"printf '{gpus}'"
        for name, does in (("nvcc", f"echo {' '.join(known)}"), ("nvidia-smi", answer)):
            (folder / name).write_text(f"#!/bin/sh\n{does}\n")
            (folder / name).chmod(0o755)
        script = folder / "choose.cmake"
        script.write_text(
            f"""
            set(SPECTRAIN_NVCC {folder}/nvcc)
            set(SPECTRAIN_NVIDIA_SMI {folder}/nvidia-smi)
            set(SPECTRAIN_ARCHS "{archs}")
            set(SPECTRAIN_CUDA_ARCH_LIST "{wanted}")
            set(CMAKE_SYSTEM_PROCESSOR {"aarch64" if arm else "x86_64"})
            include({ROOT / "cmake" / "CudaArchitectures.cmake"})
            spectrain_architectures(flags names why)
            string(REPLACE "-gencode=arch=" "" flags "${{flags}}")
            message("${{names}}: ${{why}}: ${{flags}}")
            """
        )
        return _try("cmake", "-P", str(script))

    @pytest.mark.parametrize(
        ("gpus", "settings", "expected"),
        [
            (None, {}, f"{MAJOR}: no GPU was visible"),
            ("12.0\n8.6\n7.5\n", {}, "sm_75 sm_86 sm_120 compute_86: the visible GPUs"),
            ("9.0\n14.0\n", {}, f"{MAJOR}: the compiler does not know all visible GPUs, 90, 140"),
            ("9.0\n", {"archs": "major"}, f"{MAJOR}: SPECTRAIN_ARCHS=major"),
            (None, {"archs": "ALL"}, f"{ALL}: SPECTRAIN_ARCHS=all"),
            (None, {"arm": True}, f"{ARM}: no GPU was visible"),
            (None, _OLD, f"{MAJOR}: SPECTRAIN_ARCHS=major"),
            (None, {**_OLD, "arm": True}, f"{ARM_12_9}: SPECTRAIN_ARCHS=major"),
            (
                *(None, {"wanted": "8.0;9.0a;10.0+PTX"}),
                "sm_80 sm_90a sm_100 compute_100: TORCH_CUDA_ARCH_LIST",
            ),
            ("9.0\n", {"archs": "native", "wanted": "7.5"}, "sm_90 compute_90: the visible GPUs"),
        ],
    )
    def test_what_is_built_and_why(
        self, gpus: str | None, settings: dict[str, Any], expected: str, tmp_path: Path
    ) -> None:
        done = self._choose(tmp_path, gpus, **settings)
        assert done.returncode == 0, done.stderr
        names, why, flags = done.stderr.strip().split(": ", 2)
        assert f"{names}: {why}" == expected
        pairs = [flag.split(",code=") for flag in flags.split(";")]
        assert [code for _, code in pairs] == names.split()
        for virtual, code in pairs:  # which is PTX, its own, or later
            assert int(re.sub(r"\D", "", virtual)) <= int(re.sub(r"\D", "", code))
        if "wanted" not in settings:
            assert len({virtual for virtual, _ in pairs}) <= 2

    @pytest.mark.parametrize(
        ("gpus", "settings", "told"),
        [
            ("14.0\n", {"archs": "native"}, "have the architectures '140'"),
            (None, {"archs": "hopper"}, "SPECTRAIN_ARCHS: expected native, major or all"),
            (None, {"wanted": "9.0;Hopper"}, "TORCH_CUDA_ARCH_LIST: expected entries like 9.0"),
        ],
    )
    def test_what_cannot_be_built_is_told(
        self, gpus: str | None, settings: dict[str, Any], told: str, tmp_path: Path
    ) -> None:
        done = self._choose(tmp_path, gpus, **settings)
        assert done.returncode != 0 and told in " ".join(done.stderr.split())


class TestCudaIsAChoice:
    """SPECTRAIN_CUDA, passed on by setup.py; test_core.py leaves it out."""

    @pytest.mark.skipif(shutil.which("ninja", path=TOOLS) is None, reason="needs ninja")
    @pytest.mark.parametrize("choice", ["AUTO", "ON"])
    def test_without_a_compiler(self, choice: str, tmp_path: Path) -> None:
        """Run only CMake's configuration: one line says it, or insisting names the remedy."""
        places = [*TOOLS.split(os.pathsep), "/usr/local/bin", "/usr/bin", "/usr/local/cuda/bin"]
        hidden = [str(Path(d)) for d in places if (Path(d) / "nvcc").exists()]
        if str(Path(sys.executable).parent) in hidden:
            pytest.skip("the CUDA compiler lies beside Python")
        command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja"]
        command += [f"-DSPECTRAIN_{name}=OFF" for name in ("PYTHON", "TESTS")]
        command += [f"-DSPECTRAIN_CUDA={choice}", f"-DCMAKE_IGNORE_PATH={';'.join(hidden)}"]
        done = _try(*command, timeout=300, CUDACXX="", CUDA_HOME="", CUDA_PATH="")
        assert (done.returncode == 0) == (choice == "AUTO"), done.stderr
        if choice == "AUTO":
            assert len(re.findall(r"^.*CPU only.*nvcc.*$", done.stdout, re.MULTILINE)) == 1
        else:
            assert "nvcc" in done.stderr and "CUDA_HOME" in done.stderr

    def test_another_word_is_refused(self) -> None:
        command = [sys.executable, str(ROOT / "setup.py"), "build_ext"]
        done = _try(*command, SPECTRAIN_CUDA="maybe")
        if "No module named 'setuptools'" in done.stderr:
            pytest.skip("needs setuptools")
        assert done.returncode != 0
        assert "SPECTRAIN_CUDA" in done.stderr and "maybe" in done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made of a copy: setuptools writes beside the sources."""
    for name in ("build", "setuptools", "pybind11"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("sdist")
    for name in _kept(ROOT):
        (folder / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "sources" / name)
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    _run(*command, "--outdir", str(folder), str(folder / "sources"))
    (made,) = folder.glob("*.tar.gz")
    return made


FOLDERS = ("bench", "cmake", "csrc", "docs", "examples", "spectrain_ext", "studies", "tests")
#: What tools leave in the folders.
MADE = re.compile(r"(?:^|/)(?:__pycache__|\.(?!ci/|github/)[\w-]+)/|\.(?:so|pyc|o)$")


def _kept(root: Path) -> set[str]:
    """Return the files of the project, without asking git, which a source distribution has not."""
    paths = [p for folder in (*FOLDERS, ".ci", ".github") for p in (root / folder).rglob("*")]
    paths += [path for path in root.iterdir() if path.name not in (".git", ".gitignore")]
    names = {path.relative_to(root).as_posix() for path in paths if path.is_file()}
    return {name for name in names if not MADE.search(name)}


@pytest.mark.compiler
class TestSourceDistribution:
    def test_it_has_every_file_of_the_project(self, sdist: Path) -> None:
        with tarfile.open(sdist) as archive:
            names = {member.name.partition("/")[2] for member in archive if member.isfile()}
        own = {"PKG-INFO", "setup.cfg"}
        assert {n for n in names if ".egg-info/" not in n} - own == _kept(ROOT)
        pytest.importorskip("twine")  # an index accepts it and renders the README
        _run(sys.executable, "-m", "twine", "check", "--strict", str(sdist))

    @pytest.mark.nightly
    @pytest.mark.timeout(1200)
    def test_a_wheel_can_be_built_from_it(self, sdist: Path, tmp_path: Path) -> None:
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path, filter="data")
        (sources,) = tmp_path.iterdir()
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(sources)]
        _run(*command, timeout=1200, SPECTRAIN_CUDA="0")
        (wheel,) = (sources / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = {Path(name) for name in archive.namelist()}
        assert {n for n in names if n.parts[0] == "spectrain_ext" and n.suffix != ".so"} == {
            path.relative_to(ROOT)
            for suffix in ("*.py", "*.pyi", "py.typed", "*.json")
            for path in (ROOT / "spectrain_ext").rglob(suffix)
        }
        assert len([name for name in names if name.suffix == ".so"]) == 1
