"""Loads names on first use: those of a package's modules, and those of rooms above the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]

#: The names that the engine finds in rooms above it; for each, the module below this package.
NAMES = {
    "corrections": "passes",
    **dict.fromkeys(("Metrics", "Trace", "progress_shown"), "tools.metrics"),
    **dict.fromkeys(("form_of", "materialize", "unexpected", "TracedStage"), "tools.models"),
    **dict.fromkeys(("plan", "planned_cut"), "tools.planning"),
    "simulate": "tools.simulation",
}

#: Modules by the names that they had before.
MOVED = {
    "codecs": "passes.codecs",
    "observation": "tools.metrics",
    "planning": "tools.planning",
    "simulation": "tools.simulation",
    "timelines": "tools.timelines",
}


def later(name: str) -> Any:
    """Return the object of a name in ``NAMES``."""
    return getattr(import_module(f"{_PACKAGE}.{NAMES[name]}"), name)


def attributes(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``, which load modules on first use.

    ``modules``: by name of the package, the module below it that has the name.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__


class Moved:
    """Finds modules of ``MOVED``: a finder for ``sys.meta_path``."""

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
