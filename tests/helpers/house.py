"""Counts lines, files, words, arguments and names, so that growth is seen.

``python -m helpers.house`` prints the counts beside their ceilings, as ``make test`` does.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import spectrain_ext as st

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spectrain_ext"

#: Whoever gets below a ceiling lowers it. Raising one takes a sentence in CHANGELOG.md.
CEILINGS = {
    "package, lines": 32122,
    "package, files": 130,
    "core, lines": 14348,
    "core, files": 58,
    "csrc, lines": 5196,
    "bench, lines": 7275,
    "studies, lines": 4999,
    "manual, words": 25556,
    "arguments of Pipeline": 17,
    "arguments of DistributedPipeline": 23,
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
    return {
        "package, lines": lines(package),
        "package, files": len(package),
        "core, lines": lines(core),
        "core, files": len(core),
        "csrc, lines": lines(native),
        "bench, lines": lines((ROOT / "bench").rglob("*.py")),
        "studies, lines": lines((ROOT / "studies").rglob("*.py")),
        "manual, words": words((ROOT / "docs").glob("*.md")),
        "arguments of Pipeline": arguments(st.Pipeline),
        "arguments of DistributedPipeline": arguments(st.DistributedPipeline),
        "names in spectrain_ext": len(st.__all__),
    }


if __name__ == "__main__":
    for name, count in counts().items():
        print(f"{name:34}{count:8,}   ceiling {CEILINGS[name]:8,}")
