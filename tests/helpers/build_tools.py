"""Runs compilers and what they have built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: cmake and ninja from the tests' environment, otherwise from the machine
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
#: What CMake may not find, by a word of its message.
_NEEDS = {"GTest": "GoogleTest (Debian: libgtest-dev)", "SPECTRAIN_NVCC": "nvcc (CUDA toolkit)"}


def run(*command: object) -> str:
    """Return what a command prints; skip the test if CMake lacks something."""
    done = subprocess.run(
        [str(c) for c in command],
        env={**os.environ, "PATH": TOOLS},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    for word, what in _NEEDS.items():
        if word in done.stdout and "CMake Error" in done.stdout:
            pytest.skip(f"needs {what}")
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout
