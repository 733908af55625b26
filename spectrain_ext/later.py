"""Lists what the engine finds in rooms above it, by name, and loads it when it is used."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]

#: By name: the module below this package that has it.
NAMES = {
    "corrections": "passes",
    **dict.fromkeys(("Metrics", "Trace", "progress_shown"), "tools.metrics"),
    **dict.fromkeys(("form_of", "materialize", "unexpected", "TracedStage"), "tools.models"),
    **dict.fromkeys(("plan", "planned_cut"), "tools.planning"),
    "simulate": "tools.simulation",
}

#: Modules that had other names before, by these.
MOVED = {
    "codecs": "passes.codecs",
    "observation": "tools.metrics",
    "planning": "tools.planning",
    "simulation": "tools.simulation",
    "timelines": "tools.timelines",
}


def later(name: str) -> Any:
    return getattr(import_module(f"{_PACKAGE}.{NAMES[name]}"), name)


class Moved:
    """Finds modules by the names that they had before: ``sys.meta_path`` has the class."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, room = name.rpartition(".")
        known = package == _PACKAGE and room in MOVED
        return spec_from_loader(name, cls) if known else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None: ...

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        room = MOVED[module.__name__.rpartition(".")[2]]
        sys.modules[module.__name__] = import_module(f"{_PACKAGE}.{room}")
