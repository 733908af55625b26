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
from typing import NamedTuple

import pytest
from elftools.elf.elffile import ELFFile

from spectrain_ext import _C

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
NATIVE = Path(_C.__file__ or "")
# cmake and ninja from the environment that runs the tests, else from the machine
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Linked(NamedTuple):
    """What the dynamic linker sees of the extension."""

    libraries: list[str]
    imported: list[str]
    exported: list[str]


@pytest.fixture(scope="module")
def linked() -> Linked:
    with NATIVE.open("rb") as file:
        elf = ELFFile(file)
        tags = elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
        symbols = [s for s in elf.get_section_by_name(".dynsym").iter_symbols() if s.name]
        return Linked(
            [tag.needed for tag in tags],
            [symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"],
            [symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"],
        )


class TestBinaryInterface:
    def test_no_torch_library_and_no_cuda_runtime_is_linked(self, linked: Linked) -> None:
        """The CUDA runtime is static, so that import works where there is no CUDA at all."""
        assert "libstdc++.so.6" in linked.libraries
        foreign = re.compile("torch|c10|cudart|libcuda")
        assert not [name for name in linked.libraries if foreign.search(name)]

    def test_no_symbol_of_torch_or_cuda_is_imported(self, linked: Linked) -> None:
        """One build then serves every torch: no c10::, at:: or torch::, no THP or aoti_ in C."""
        assert "PyType_Ready" in linked.imported
        foreign = re.compile(
            r"_Z\w*?(?:3c10|2at|5torch)(?![a-z])|^THP|^(?:aoti_)?torch|^cu(da)?[A-Z]"
        )
        for name in ("_ZN3c106Device8validateEv", "_ZNK2at6Tensor3dimEv", "cudaMalloc", "cuInit"):
            assert foreign.search(name)
        assert not [name for name in linked.imported if foreign.search(name)]

    def test_nothing_of_ours_is_exported_but_the_entry(self, linked: Linked) -> None:
        """A second copy in one process, of another version, must not be bound to this one's."""
        assert "PyInit__C" in linked.exported
        assert not [name for name in linked.exported if re.match(r"_ZNK?9spectrain", name)]


def test_build_info_is_complete() -> None:
    info = _C.build_info()
    assert info["openmp"] is True
    assert info["compiler"] and info["version"]
    assert bool(info["cuda_architectures"]) == info["cuda"] == bool(info["cuda_compiler"])
    assert bool(info["cuda_architectures_why"]) == info["cuda"]
    if platform.machine() == "x86_64":
        assert info["cpu_instruction_set"].startswith("x86-64")


def test_the_module_is_named_for_this_python() -> None:
    assert NATIVE.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))


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
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    unbuilt, broken = done.stdout.splitlines()
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


def _mixes_widths(name: str) -> bool:
    """Return whether a kernel, by its mangled name, mixes 16-bit streams with float32."""
    return bool(re.search("Half|BFloat16", name) and re.search("[IE_f]f", name))


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
        """1,024 threads are resident on every architecture, 512 of kernels that divide (Adam)."""
        usage = self._dump("--dump-resource-usage")
        machine = [a for a in _C.build_info()["cuda_architectures"] if a.startswith("sm_")]
        count = 0
        for part in usage.split("arch = ")[1:]:
            is_90 = part.startswith("sm_90\n")
            for name, registers, stack, local in re.findall(
                r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", part
            ):
                count += 1
                assert local == "0" and int(stack) == 0, name
                # on other architectures kernels with blocks of 256 threads may use a few more:
                # distances 66
                if is_90 or "run_table" in name or "run_resident" in name:
                    assert int(registers) <= (128 if "Adam" in name else 64), name
        assert count >= 150 * len(machine)

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
            mixed = _mixes_widths(name)
            assert re.search(rf"\bld{whole}", entry), name
            assert re.search(rf"\bst{whole}" + (rf"|\bst{half}" if mixed else ""), entry), name
            assert bool(re.search(rf"\b(?:ld|st){half}", entry)) == mixed, name
            generic = re.findall(r"\b(?:ld|st)\.(?:v\d\.)?[usfb]\d+\b.*", entry)
            assert not generic, (name, generic)
            assert ".local" not in entry, name

    @pytest.mark.nightly
    @pytest.mark.skipif(_cuda_tool("nvdisasm") is None, reason="needs nvdisasm (CUDA toolkit)")
    def test_machine_code_of_every_architecture_has_vectors_and_no_local_memory(self) -> None:
        machine = [a for a in _C.build_info()["cuda_architectures"] if a.startswith("sm_")]
        kernels: dict[str, int] = dict.fromkeys(machine, 0)
        for arch in machine:
            code_of = self._dump("--dump-sass", "--gpu-architecture", arch)
            for part in code_of.split("Function : ")[1:]:
                name, code = part.split("\n", 1)
                if not re.search("run_table|run_resident", name):
                    continue
                kernels[arch] += 1
                for access in ("LDG", "STG"):
                    bits = "(128|64)" if access == "STG" and _mixes_widths(name) else "128"
                    found = re.search(rf"\b{access}\.E\.(\w+\.)*{bits}\b", code)
                    assert found, (arch, name, access)
                spilled = re.findall(r"\b(?:LDL|STL)\b.*", code)
                assert not spilled, (arch, name, spilled)
        assert kernels and min(kernels.values()) >= 150, kernels


KNOWN = ["compute_70", "sm_70", *(f"sm_{n}" for n in (75, 80, 86, 87, 90, 100, 103, 110, 120))]
#: Of CUDA 12.9, which compiles the wheels: Jetson Thor is 10.1 in it.
KNOWN_12_9 = [f"sm_{n}" for n in (50, 52, 60, 70, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)]


@pytest.mark.skipif(shutil.which("cmake", path=TOOLS) is None, reason="needs cmake")
class TestArchitectures:
    """GPUs to build for: only CMake's module, with stand-ins for nvcc and nvidia-smi."""

    @staticmethod
    def _choose(
        folder: Path,
        gpus: str | None,
        *,
        archs: str = "",
        wanted: str = "",
        arm: bool = False,
        known: Sequence[str] = KNOWN,
    ) -> subprocess.CompletedProcess[str]:
        """Run the CMake module with a compiler for `known`; `gpus` is None without a driver."""
        nvcc, smi, script = folder / "nvcc", folder / "nvidia-smi", folder / "choose.cmake"
        nvcc.write_text("#!/bin/sh\necho " + " ".join(known) + "\n")
        answer = "echo no driver; exit 9" if gpus is None else f"printf '{gpus}'"
        smi.write_text(f"#!/bin/sh\n{answer}\n")
        for tool in (nvcc, smi):
            tool.chmod(0o755)
        script.write_text(
            f"""
            set(SPECTRAIN_NVCC {nvcc})
            set(SPECTRAIN_NVIDIA_SMI {smi})
            set(SPECTRAIN_ARCHS "{archs}")
            set(SPECTRAIN_CUDA_ARCH_LIST "{wanted}")
            set(CMAKE_SYSTEM_PROCESSOR {"aarch64" if arm else "x86_64"})
            include({ROOT / "cmake" / "CudaArchitectures.cmake"})
            spectrain_architectures(flags names why)
            string(REPLACE "-gencode=arch=" "" flags "${{flags}}")
            message("${{names}}: ${{why}}: ${{flags}}")
            """
        )
        return subprocess.run(
            ["cmake", "-P", str(script)],
            env={**os.environ, "PATH": TOOLS},
            capture_output=True,
            text=True,
            timeout=60,
        )

    MAJOR = "sm_75 sm_80 sm_90 sm_100 sm_120 compute_80"

    @pytest.mark.parametrize(
        ("gpus", "settings", "expected"),
        [
            (None, {}, f"{MAJOR}: no GPU was visible"),
            ("", {}, f"{MAJOR}: no GPU was visible"),
            ("9.0\n9.0\n", {}, "sm_90 compute_90: the visible GPUs"),
            ("12.0\n8.6\n7.5\n", {}, "sm_75 sm_86 sm_120 compute_86: the visible GPUs"),
            ("7.5\n", {"archs": "native"}, "sm_75 compute_75: the visible GPUs"),
            ("9.0\n14.0\n", {}, f"{MAJOR}: the compiler does not know all visible GPUs, 90, 140"),
            ("6.1\n", {}, f"{MAJOR}: the compiler does not know all visible GPUs, 61"),
            ("9.0\n", {"archs": "major"}, f"{MAJOR}: SPECTRAIN_ARCHS=major"),
            (
                None,
                {"archs": "ALL"},
                "sm_75 sm_80 sm_86 sm_87 sm_90 sm_100 sm_103 sm_110 sm_120 compute_80: "
                "SPECTRAIN_ARCHS=all",
            ),
            (
                None,
                {"arm": True},
                "sm_75 sm_80 sm_87 sm_90 sm_100 sm_110 sm_120 compute_80: no GPU was visible",
            ),
            (
                None,
                {"archs": "major", "known": KNOWN_12_9},
                f"{MAJOR}: SPECTRAIN_ARCHS=major",
            ),
            (
                None,
                {"archs": "major", "known": KNOWN_12_9, "arm": True},
                "sm_75 sm_80 sm_87 sm_90 sm_100 sm_120 compute_80: SPECTRAIN_ARCHS=major",
            ),
            ("8.0\n", {"wanted": "9.0 8.6"}, "sm_86 sm_90: TORCH_CUDA_ARCH_LIST"),
            (
                None,
                {"wanted": "8.0;9.0a;10.0+PTX"},
                "sm_80 sm_90a sm_100 compute_100: TORCH_CUDA_ARCH_LIST",
            ),
            (
                "9.0\n",
                {"archs": "native", "wanted": "7.5"},
                "sm_90 compute_90: the visible GPUs",
            ),
        ],
    )
    def test_what_is_built_and_why(
        self, gpus: str | None, settings: dict[str, object], expected: str, tmp_path: Path
    ) -> None:
        done = self._choose(tmp_path, gpus, **settings)  # type: ignore[arg-type]
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
            (None, {"archs": "native"}, "have the architectures ''"),
            ("14.0\n", {"archs": "native"}, "have the architectures '140'"),
            (None, {"archs": "hopper"}, "SPECTRAIN_ARCHS: expected native, major or all"),
            (None, {"wanted": "9.0;Hopper"}, "TORCH_CUDA_ARCH_LIST: expected entries like 9.0"),
        ],
    )
    def test_what_cannot_be_built_is_told(
        self, gpus: str | None, settings: dict[str, str], told: str, tmp_path: Path
    ) -> None:
        done = self._choose(tmp_path, gpus, **settings)  # type: ignore[arg-type]
        assert done.returncode != 0
        assert told in " ".join(done.stderr.split())


def _known_architectures() -> list[int]:
    nvcc = _cuda_tool("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    known = [a for a in _run(nvcc, "--list-gpu-code").split() if re.fullmatch(r"sm_\d+", a)]
    return sorted(int(a[3:]) for a in known if int(a[3:]) >= 75)


CUDA_SOURCES = sorted(ROOT.glob("csrc/kernels/cuda/*.cu"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.name)
def test_no_spills_on_any_architecture(source: Path, tmp_path: Path) -> None:
    known = _known_architectures()
    nvcc = _cuda_tool("nvcc")
    assert nvcc is not None
    command = [nvcc, "-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v", "--threads", "2", "-c"]
    command += [f"-I{ROOT / 'csrc'}"]
    command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in known]
    command += [str(source), "-o", str(tmp_path / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert {int(a) for a in re.findall(r"for 'sm_(\d+)'", log)} == set(known)
    # "Function properties for NAME", then its figures
    spilling = re.findall(r"properties for (\S+)\n(?!\s+0 bytes stack frame, 0 bytes spill).*", log)
    assert "Function properties for" in log
    assert not spilling


def test_there_are_sources_for_gpus() -> None:
    """Otherwise the test above would have nothing to check."""
    assert {"sgd.cu", "adam.cu", "copy.cu"} <= {path.name for path in CUDA_SOURCES}


def _configure(
    build: Path, choice: str, *, hide_compiler: bool
) -> subprocess.CompletedProcess[str]:
    """Run only CMake's configuration, with or without a CUDA compiler."""
    if shutil.which("cmake", path=TOOLS) is None or shutil.which("ninja", path=TOOLS) is None:
        pytest.skip("needs cmake and ninja")
    environment = {**os.environ, "PATH": TOOLS}
    command = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    command += ["-DSPECTRAIN_PYTHON=OFF", "-DSPECTRAIN_TESTS=OFF", f"-DSPECTRAIN_CUDA={choice}"]
    if hide_compiler:
        for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
            environment.pop(name, None)
        places = [*TOOLS.split(os.pathsep), "/usr/local/bin", "/usr/bin", "/usr/local/cuda/bin"]
        hidden = [str(Path(d)) for d in places if (Path(d) / "nvcc").exists()]
        if str(Path(sys.executable).parent) in hidden:
            pytest.skip("the CUDA compiler lies beside Python")
        command.append(f"-DCMAKE_IGNORE_PATH={';'.join(dict.fromkeys(hidden))}")
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


class TestCudaIsAChoice:
    """SPECTRAIN_CUDA, passed on by setup.py."""

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
    def test_it_has_every_file_that_building_testing_and_training_need(self, sdist: Path) -> None:
        with tarfile.open(sdist) as archive:
            names = {member.name.partition("/")[2] for member in archive if member.isfile()}
        own = {"PKG-INFO", "setup.cfg"}
        assert {n for n in names if ".egg-info/" not in n} - own == _kept(ROOT)

    def test_an_index_accepts_it_and_renders_the_readme(self, sdist: Path) -> None:
        pytest.importorskip("twine")
        _run(sys.executable, "-m", "twine", "check", "--strict", str(sdist))

    @pytest.mark.nightly
    @pytest.mark.timeout(1200)
    def test_a_wheel_can_be_built_from_it(self, sdist: Path, tmp_path: Path) -> None:
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path, filter="data")
        (sources,) = tmp_path.iterdir()
        done = subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(sources)],
            env={**os.environ, "PATH": TOOLS, "SPECTRAIN_CUDA": "0"},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        (wheel,) = (sources / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = {Path(name) for name in archive.namelist()}
        assert {n for n in names if n.parts[0] == "spectrain_ext" and n.suffix != ".so"} == {
            path.relative_to(ROOT)
            for suffix in ("*.py", "*.pyi", "py.typed", "*.json")
            for path in (ROOT / "spectrain_ext").rglob(suffix)
        }
        assert len([name for name in names if name.suffix == ".so"]) == 1
