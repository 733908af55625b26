"""Configures, builds and installs the native module with CMake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).parent.resolve()
CUDA_CHOICES = {"": "AUTO", "auto": "AUTO", "1": "ON", "on": "ON", "0": "OFF", "off": "OFF"}


class CMakeBuild(build_ext):
    """A build step that runs CMake and ninja instead of the compiler."""

    def build_extension(self, ext: Extension) -> None:
        """Configure, build and install `_C` where setuptools expects it."""
        choice = os.environ.get("SPECTRAIN_CUDA", "").lower()
        if choice not in CUDA_CHOICES:
            raise SystemExit(f"SPECTRAIN_CUDA: expected 0 or 1, or unset, got {choice!r}")
        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        # The cache names tools of a build environment that pip has deleted since.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "SPECTRAIN_PYTHON": "ON",
            "SPECTRAIN_TESTS": "OFF",
            "SPECTRAIN_VERSION": self.distribution.get_version(),
            "SPECTRAIN_CUDA": CUDA_CHOICES[choice],
            "SPECTRAIN_ARCHS": os.environ.get("SPECTRAIN_ARCHS", ""),
            "SPECTRAIN_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
            "Python_EXECUTABLE": sys.executable,
        }
        configure = ["-S", str(SOURCE), "-B", str(build), "-G", "Ninja"]
        configure += [f"-D{name}={value}" for name, value in options.items()]
        install = ["--install", str(build), "--prefix", str(target), "--component", "python"]
        try:
            for arguments in (configure, ["--build", str(build)], install):
                subprocess.run(["cmake", *arguments], check=True)
        except FileNotFoundError as error:
            raise SystemExit(f"building needs cmake and ninja: {error}") from error
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"building the native module failed, see above ({error})") from error


setup(
    ext_modules=[Extension("spectrain_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
