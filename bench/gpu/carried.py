"""Finds the files of `make gpu-wheel` and checks that they match these sources."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .scale import ROOT

FOLDER = ROOT / "build" / "gpu"
_SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".toml"}


def fingerprint() -> str:
    """Return a hash of all sources of the package, and of the program in tests/ptx."""
    digest = hashlib.sha256()
    own = ("CMakeLists.txt", "pyproject.toml", "setup.py")
    paths = [ROOT / name for name in own]
    for folder in ("cmake", "csrc", "spectrain_ext", "tests/ptx"):
        paths += sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in _SUFFIXES)
    for path in paths:
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def carried(pattern: str) -> Path:
    """Return a file that was built beforehand.

    Raises:
        FileNotFoundError: there is none, or it was built from other sources.
    """
    found = sorted(FOLDER.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{pattern} was not carried along: make gpu-wheel")
    made_from = FOLDER / "sources"
    if not made_from.exists() or made_from.read_text().strip() != fingerprint():
        raise FileNotFoundError(f"{found[-1].name} is of other sources: make gpu-wheel again")
    return found[-1]


if __name__ == "__main__":  # python -m gpu.carried, from bench/
    print(fingerprint())
