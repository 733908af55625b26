"""The package for the Python that runs the suite: as it is, from a carried wheel, or compiled."""

from __future__ import annotations

import importlib.util
import json
import os
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

#: What tests need, by module and by name of the package.
_TOOLS = {
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
    "click": "click",
    "rich": "rich",
    "safetensors": "safetensors",
}
#: Imports what is to be used, asks driver and devices, and launches a kernel on each of them.
_CHECK = """
import ctypes, json
from spectrain_ext import _C
about = {"build": _C.build_info(), "driver": None, "capabilities": [], "failed": None}
try:
    version = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
        about["driver"] = [version.value // 1000, version.value % 1000 // 10]
except OSError:
    pass
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
    """Leaves a package that can be imported, and whose kernels this driver runs on every GPU."""
    site = out / "site"

    def usable() -> dict[str, Any]:
        about = json.loads(_run([sys.executable, "-c", _CHECK]).splitlines()[-1])
        if scale.on_gpu:
            why = refused(about["build"], about["driver"], about["capabilities"])
            if why or about["failed"]:
                raise RuntimeError(why or about["failed"])
        return dict(about)

    def unpacked() -> dict[str, Any]:
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        # Its program apart, a wheel is an archive of what is to be imported.
        with zipfile.ZipFile(carried(f"spectrain_ext-*-{tag}-*.whl")) as wheel:
            wheel.extractall(site)
        return usable()

    def compiled() -> dict[str, Any]:
        shutil.rmtree(site, ignore_errors=True)
        if scale.on_gpu and compiler() is None:
            raise RuntimeError(
                "there is no nvcc on PATH or in CUDA_HOME to compile with: install a CUDA toolkit "
                "that is no newer than the driver, or bring a wheel (make gpu-wheel)"
            )
        os.environ.setdefault("SPECTRAIN_CUDA", "1" if scale.on_gpu else "0")
        _pip("--no-build-isolation", "--no-deps", "--target", str(site), str(ROOT))
        return usable()

    ways = {"as it is": usable, "the wheel": unpacked, "from source": compiled}
    for name, way in ways.items():
        if cases.run(name, way) is not None:
            for earlier in list(ways)[: list(ways).index(name)]:  # no failure any more
                cases.put(earlier, **{**cases.data[earlier], "status": "passed over"})
            break
    for module, package in _TOOLS.items():
        if importlib.util.find_spec(module) is None:
            links = ("--no-index", "--find-links", str(FOLDER))
            cases.run(package, lambda p=package, ls=links: _pip(*ls, "--target", str(site), p))  # type: ignore[misc]


def refused(
    build: Mapping[str, Any],
    driver: Sequence[int] | None,  # the newest CUDA that it runs
    capabilities: Sequence[Sequence[int]],
) -> str | None:
    """Why this driver cannot run a build on these GPUs; None: it can.

    Within one major version of CUDA a driver runs what a newer toolkit has compiled for its GPU,
    but does not compile a newer toolkit's PTX.
    """
    if not build["cuda"]:
        return "it has no CUDA half"
    if driver is None:
        return "there is no driver: libcuda.so.1 cannot be loaded"
    toolkit = [int(part) for part in build["cuda_compiler"].split(".")[:2]]
    by = f"it was compiled by CUDA {build['cuda_compiler']}, and the driver runs CUDA "
    by += ".".join(map(str, driver))
    if toolkit[0] > driver[0]:
        return f"{by}: update the driver, or compile with a toolkit of CUDA {driver[0]}"
    for k, capability in enumerate(capabilities):
        if not any(_covers(each, tuple(capability), "sm") for each in build["cuda_architectures"]):
            name = ".".join(map(str, capability))
            ptx = any(
                _covers(each, tuple(capability), "compute") for each in build["cuda_architectures"]
            )
            if not ptx:
                made = ", ".join(build["cuda_architectures"])
                return f"GPU {k} has compute capability {name}, and it was compiled for {made}"
            if toolkit > list(driver):
                return f"GPU {k}, of compute capability {name}, would run its PTX, but {by}"
    return None


def _covers(architecture: str, capability: tuple[int, ...], kind: str) -> bool:
    """Whether code of that kind, "sm" for machine code or "compute" for PTX, runs there."""
    mine, _, digits = architecture.partition("_")
    built = divmod(int("".join(filter(str.isdigit, digits))), 10)
    if mine != kind or built > capability:
        return False
    if kind == "compute" or built == capability:
        return True
    # Later minor versions run it, but for the integrated GPUs, which only run what is their own.
    return built[0] == capability[0] and capability not in ((8, 7), (11, 0))


def compiler() -> str | None:
    """The CUDA compiler that a build would find."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places = [os.path.join(home, "bin") for home in homes] + [os.environ.get("PATH", os.defpath)]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def _pip(*arguments: str) -> str:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return _run([*pip, "--no-cache-dir", "--no-compile", *arguments])


def _run(command: list[str]) -> str:
    # Not the root: what is installed is looked at, not the source tree.
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "bench")
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-1500:])
    return done.stdout
