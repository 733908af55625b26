"""The package for the Python that runs the suite: as it is, from a carried wheel, or compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
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
_CHECK = """
import json
from spectrain_ext import _C
print(json.dumps(_C.build_info()))
"""


def install(cases: Cases, scale: Scale, out: Path) -> None:
    """Leaves a package that can be imported, with its CUDA half where there is a GPU."""
    site = out / "site"

    def usable() -> dict[str, Any]:
        info = json.loads(_run([sys.executable, "-c", _CHECK]).splitlines()[-1])
        if scale.on_gpu and not info["cuda"]:
            raise RuntimeError("it has no CUDA half")
        return dict(info)

    def unpacked() -> dict[str, Any]:
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        # Its program apart, a wheel is an archive of what is to be imported.
        with zipfile.ZipFile(carried(f"spectrain_ext-*-{tag}-*.whl")) as wheel:
            wheel.extractall(site)
        return usable()

    def compiled() -> dict[str, Any]:
        shutil.rmtree(site, ignore_errors=True)
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


def _pip(*arguments: str) -> str:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return _run([*pip, "--no-cache-dir", "--no-compile", *arguments])


def _run(command: list[str]) -> str:
    # Not the root: what is installed is looked at, not the source tree.
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "bench")
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-1500:])
    return done.stdout
