"""Counts lines, files, words, arguments and names, so that growth is seen.

``python -m helpers.house`` prints the counts beside their ceilings, as ``make test`` does.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import spectrain_ext as st

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spectrain_ext"
TESTS = ROOT / "tests"

#: Files of rooms that documents, or an entry point, name as modules of their own.
DOCUMENTED = {f"spectrain_ext.{name}" for name in ("cli.__main__", "operators.laws")}

#: Whoever gets below a ceiling lowers it. Raising one takes a sentence in CHANGELOG.md.
CEILINGS = {
    "package, lines": 32232,
    "package, files": 146,
    "core, lines": 12714,
    "core, files": 58,
    "csrc, lines": 5266,
    "bench, lines": 8228,
    "studies, lines": 5351,
    "tests, lines": 42480,
    "tests that import inner modules": 14,
    "manual, words": 30212,
    "arguments of Pipeline": 15,
    "arguments of DistributedPipeline": 18,
    "names in spectrain_ext": 42,
}


@cache
def core_modules() -> list[Path]:
    """Return the modules that README's pipeline loads, in a process of its own.

    The room that cuts its model into stages does not count: it has done its work before.
    """
    readme = (ROOT / "README.md").read_text()
    example = next(
        block
        for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        if "st.Pipeline(" in block
    )
    shorter = re.sub(r"range\(\d+\)]$", "range(2)]", example, flags=re.MULTILINE)
    program = f"{shorter}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    names = done.stdout.decode().splitlines()[-1].split()
    found = []
    for name in names:
        package, *below = name.split(".")
        if package != "spectrain_ext" or below[:1] == ["partitioning"]:
            continue
        path = PACKAGE.joinpath(*below)
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():  # not the native module
            found.append(file)
    return found


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
    paths = [path.relative_to(ROOT).with_suffix("") for path in PACKAGE.glob("*/*.py")]
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
    return len(inspect.signature(what).parameters)


def counts() -> dict[str, int]:
    package = list(PACKAGE.rglob("*.py"))
    core = core_modules()
    native = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    tests = [path for path in TESTS.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    return {
        "package, lines": lines(package),
        "package, files": len(package),
        "core, lines": lines(core),
        "core, files": len(core),
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
        print(f"{name:34}{count:8,}   ceiling {CEILINGS[name]:8,}")
