"""Trains methods side by side on built-in or your own models and data.

Run ``python -m studies train`` or ``python -m studies study`` from this folder's parent. The
installed package is used: Python would otherwise find the uncompiled sources of ``spectrain_ext``
in that folder first.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_SOURCES = _ROOT / "spectrain_ext"
if not any((_SOURCES / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
    _here = [path for path in sys.path if Path(path or ".").resolve() == _ROOT]
    sys.path[:] = [*(path for path in sys.path if path not in _here), *_here]

#: The command that installs the requirements of most studies.
REMEDY = "pip install -r studies/requirements.txt"

from .workload import Workload  # noqa: E402  after the path is right

__all__ = ["REMEDY", "Workload"]
