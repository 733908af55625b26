"""Counts lines, files, words, calls, arguments and names, so that growth is seen.

``python -m helpers.house`` prints the counts, the figures and the aims, as ``make test`` does.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import spectrain_ext as st

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spectrain_ext"
TOOLS = PACKAGE / "tools"  # all else is the engine
TESTS = ROOT / "tests"

#: Files of rooms that documents, or an entry point, name as modules of their own.
DOCUMENTED = {
    f"spectrain_ext.{name}"
    for name in ("tools.commands.__main__", "operators.laws", "passes.averaging", "passes.codecs")
}


class Figure(NamedTuple):
    now: int
    aim: int | None = None


#: Whoever gets below a figure lowers it. A test fails where a count is above it by more than SLACK,
#: into which a row of a method, a pass, an operator with its tests or a page of the manual fits.
FIGURES = {
    "engine, lines": Figure(26_750, aim=20_000),
    "tools, lines": Figure(6_697, aim=5_500),
    "README's example: lines of the functions that run": Figure(6_020, aim=5_000),
    "README's example and a save: lines loaded": Figure(17_150, aim=15_000),
    "README's example and a save: files loaded": Figure(82, aim=75),
    "one update by SGD: files": Figure(7, aim=7),
    "one update by SGD: depth": Figure(4, aim=4),
    "one update by SGD: calls": Figure(18, aim=20),
    "one forward, with receive and send: files": Figure(11),
    "one forward, with receive and send: depth": Figure(3),
    "one forward, with receive and send: calls": Figure(20),
    "csrc, lines": Figure(5_560),
    "bench, lines": Figure(8_600),
    "studies, lines": Figure(5_375),
    "tests, lines": Figure(43_262, aim=38_000),
    "tests that import inner modules": Figure(13),
    "manual, words": Figure(30_900, aim=27_000),
    "arguments of Pipeline": Figure(15),
    "arguments of DistributedPipeline": Figure(18),
    "names in spectrain_ext": Figure(44),
}
SLACK = 0.03


@cache
def footprint() -> dict[str, Any]:
    """Return what ``footprint.py`` measures in a process of its own."""
    program, readme = TESTS / "helpers" / "footprint.py", ROOT / "README.md"
    command = [sys.executable, "-P", str(program), str(readme)]
    found: dict[str, Any] = json.loads(subprocess.check_output(command))
    return found


def loaded_by_example(key: str = "loaded") -> list[Path]:
    """Return the modules that README's pipeline loads, or "loaded with a save" of its weights."""
    return [PACKAGE / name for name in footprint()[key]]


def _imported(path: Path) -> Iterator[str]:
    """Return the modules of the package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            room = node.module or ""
            yield room
            names = [alias.name for alias in node.names]
            files = [name for name in names if f"{room}.{name}" in inner_modules()]
            # a room's face may give a function with the name of its file
            yield from (f"{room}.{name}" for name in files if name not in _face(room))


def _face(room: str) -> set[str]:
    tree = ast.parse(PACKAGE.joinpath(*room.split(".")[1:], "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name for node in imports for alias in node.names}


@cache
def inner_modules() -> set[str]:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]
    paths = [path.relative_to(ROOT).with_suffix("") for path in files]
    return {".".join(path.parts) for path in paths} - DOCUMENTED


@cache
def inner_imports() -> dict[Path, set[str]]:
    """Return the tests and helpers that import files of rooms, and not only rooms."""
    found = {path: inner_modules().intersection(_imported(path)) for path in TESTS.rglob("*.py")}
    return {path: modules for path, modules in found.items() if modules}


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def arguments(what: type) -> int:
    """Count those of users; ``DistributedPipeline`` gives ``Pipeline`` one more."""
    return sum(not name.startswith("_") for name in inspect.signature(what).parameters)


def counts() -> dict[str, int]:
    package = set(PACKAGE.rglob("*.py"))
    tools = {path for path in package if TOOLS in path.parents}
    saved = loaded_by_example("loaded with a save")
    update = {f"one update by SGD: {n}": count for n, count in footprint()["update"].items()}
    forward = {
        f"one forward, with receive and send: {n}": count
        for n, count in footprint()["forward"].items()
    }
    native = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    tests = [path for path in TESTS.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    return {
        "engine, lines": lines(package - tools),
        "tools, lines": lines(tools),
        "README's example: lines of the functions that run": footprint()["run"],
        "README's example and a save: lines loaded": lines(saved),
        "README's example and a save: files loaded": len(saved),
        **update,
        **forward,
        "csrc, lines": lines(native),
        "bench, lines": lines((ROOT / "bench").rglob("*.py")),
        "studies, lines": lines((ROOT / "studies").rglob("*.py")),
        "tests, lines": lines(tests),
        "tests that import inner modules": len(inner_imports()),
        "manual, words": words((ROOT / "docs").glob("*.md")),
        "arguments of Pipeline": arguments(st.Pipeline),
        "arguments of DistributedPipeline": arguments(st.DistributedPipeline),
        "names in spectrain_ext": len(st.__all__),
    }


if __name__ == "__main__":
    for name, count in counts().items():
        now, aim = FIGURES[name]
        print(f"{name:50}{count:8,}   figure {now:8,}" + (f"   aim {aim:8,}" if aim else ""))
