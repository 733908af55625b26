"""Provides the package to the suite's Python: the present one, a prebuilt wheel, or compiled."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .carried import FOLDER, carried
from .cases import Cases
from .scale import ROOT, Scale

#: The tests' dependencies, by module name and package name.
_TOOLS = {
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
    "click": "click",
    "rich": "rich",
    "safetensors": "safetensors",
}
_KINDS = ("sm", "compute")  # machine code, and PTX, which the driver compiles
#: Imports the package, queries the devices, and launches a kernel on each.
_CHECK = """
import json
from spectrain_ext import _C
about = {"build": _C.build_info(), "capabilities": [], "failed": None}
try:
    import torch, spectrain_ext as st
    for k in range(torch.cuda.device_count()):
        about["capabilities"].append(list(torch.cuda.get_device_capability(k)))
    for k in range(torch.cuda.device_count() if about["build"]["cuda"] else 0):
        w, v = [torch.ones(9, device=k)], [torch.ones(9, device=k)]
        st.predict_(w, v, lr=0.5, steps=1.0)
        assert w[0].tolist() == [0.5] * 9, w
except Exception as error:
    about["failed"] = f"{type(error).__name__}: {error}"
print(json.dumps(about))
"""


def install(cases: Cases, scale: Scale, out: Path) -> None:
    """Provide an importable package whose kernels this driver runs on every GPU."""
    site = out / "site"

    def usable() -> dict[str, Any]:
        about = json.loads(run([sys.executable, "-c", _CHECK]).splitlines()[-1])
        if scale.on_gpu:
            why = refused(about["build"], driver(), about["capabilities"])
            if why or about["failed"]:
                raise RuntimeError(why or about["failed"])
        return dict(about)

    def unpacked() -> dict[str, Any]:
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        # A wheel is an archive of importable files.
        with zipfile.ZipFile(carried(f"spectrain_ext-*-{tag}-*.whl")) as wheel:
            wheel.extractall(site)
        return usable()

    def compiled() -> dict[str, Any]:
        shutil.rmtree(site, ignore_errors=True)
        if scale.on_gpu:
            check_compiler(driver())
        os.environ.setdefault("SPECTRAIN_CUDA", "1" if scale.on_gpu else "0")
        # pip downloads build requirements that are not installed.
        here = importlib.util.find_spec("pybind11") is not None and shutil.which("ninja")
        isolation = ["--no-build-isolation"] if here else []
        _pip(*isolation, "--no-deps", "--target", str(site), str(ROOT))
        return usable()

    ways = {"as it is": usable, "the wheel": unpacked, "from source": compiled}
    for name, way in ways.items():
        if cases.run(name, way) is not None:
            for earlier in list(ways)[: list(ways).index(name)]:  # no longer a failure
                cases.put(earlier, **{**cases.data[earlier], "status": "passed over"})
            break
    for module, package in _TOOLS.items():
        if importlib.util.find_spec(module) is None:
            links = ("--no-index", "--find-links", str(FOLDER)) if FOLDER.exists() else ()
            cases.run(package, lambda p=package, ls=links: _pip(*ls, "--target", str(site), p))  # type: ignore[misc]


def refused(
    build: Mapping[str, Any],
    runs: Sequence[int] | None,  # the newest CUDA that the driver runs
    capabilities: Sequence[Sequence[int]],
) -> str | None:
    """Return why this driver cannot run a build on these GPUs, None if it can.

    Within one major version of CUDA, a driver runs machine code from a newer toolkit, but does not
    compile a newer toolkit's PTX.
    """
    if not build["cuda"]:
        return "it has no CUDA half"
    if runs is None:
        return "there is no driver: libcuda.so.1 cannot be loaded"
    toolkit = [int(part) for part in build["cuda_compiler"].split(".")[:2]]
    by = f"it was compiled by CUDA {build['cuda_compiler']}, and the driver runs CUDA "
    by += ".".join(map(str, runs))
    if toolkit[0] > runs[0]:
        return f"{by}: update the driver, or compile with a toolkit of CUDA {runs[0]}"
    for k, capability in enumerate(capabilities):
        made, name = build["cuda_architectures"], ".".join(map(str, capability))
        code, ptx = (any(_covers(m, tuple(capability), kind) for m in made) for kind in _KINDS)
        if not code and not ptx:
            made_for = ", ".join(made)
            return f"GPU {k} has compute capability {name}, and it was compiled for {made_for}"
        if not code and toolkit > list(runs):
            return f"GPU {k}, of compute capability {name}, would run its PTX, but {by}"
    return None


def _covers(architecture: str, capability: tuple[int, ...], kind: str) -> bool:
    """Return whether code of this kind runs on this device."""
    mine, _, digits = architecture.partition("_")
    built = divmod(int("".join(filter(str.isdigit, digits))), 10)
    if mine != kind or built > capability:
        return False
    if kind == "compute" or built == capability:
        return True
    # Later minor versions run it, except integrated GPUs, which only run code for themselves.
    return built[0] == capability[0] and capability not in ((8, 7), (11, 0))


def driver() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver runs, None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def check_compiler(runs: tuple[int, int] | None) -> None:
    """Raise RuntimeError if there is no nvcc, or this driver does not run its code."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places = [os.path.join(home, "bin") for home in homes] + [os.environ.get("PATH", os.defpath)]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    wanted = "a CUDA toolkit that is no newer than the driver"
    if nvcc is None:
        raise RuntimeError(
            f"there is no nvcc on PATH or in CUDA_HOME to compile with: install {wanted}, or bring "
            "a wheel (make gpu-wheel)"
        )
    release = re.search(r"release (\d+)\.(\d+)", run([nvcc, "--version"]))
    if runs is not None and release is not None and int(release[1]) > runs[0]:
        raise RuntimeError(
            f"{nvcc} is of CUDA {release[1]}.{release[2]}, and the driver runs CUDA {runs[0]}."
            f"{runs[1]}: update the driver, or install {wanted}"
        )


def _pip(*arguments: str) -> str:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return run([*pip, "--no-cache-dir", "--no-compile", *arguments])


def run(command: list[str]) -> str:
    """Return what a command prints; RuntimeError with its last words if it fails."""
    # Not the root: import the installed package, not the source tree.
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "bench")
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-1500:])
    return done.stdout
