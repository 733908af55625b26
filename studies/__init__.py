"""Studies: methods trained side by side on anyone's model and data, beside the package.

``python -m studies train`` and ``python -m studies study``, from the folder that this one is in,
for the package that is installed: Python looks into that folder first, and would find the sources
of ``spectrain_ext`` there, which nobody has compiled.
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

#: What installs what most studies need.
REMEDY = "pip install -r studies/requirements.txt"

from .workload import Workload  # noqa: E402  after the path is right

__all__ = ["REMEDY", "Workload"]
