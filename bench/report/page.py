"""docs/results.md: a section and a picture from every evidence that is there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

from table import table

from . import DOCS

#: Modules of this package in the order of their sections, with what makes their figures again, and
#: how long it takes on two cores.
EVIDENCE = {
    "accuracy": ("`python -m studies study`, as the section says", "an hour a model and more"),
    "hybrid": ("`python -m studies study`, as the section says", "two and a half hours"),
    "errors": (
        "`python bench/prediction_errors.py --data-dir tinyshakespeare.txt --json FILE`",
        "minutes",
    ),
    "throughput": (
        "`python bench/simulate_throughput.py --measure FOLDER`, and again without `--measure`",
        "minutes",
    ),
    "processes": (
        "`python bench/bench_distributed.py --ranks 2 3 4 --rounds 9 --json FILE`, and "
        "`--trials --rounds 60`",
        "ten minutes each",
    ),
    "cost": ("`python bench/bench_cost.py --json FILE`", "five minutes"),
    "quality": (
        "`python -m studies study`, as [frontier](frontier.md#how-it-was-measured) says",
        "hours",
    ),
    "workers": ("`python bench/async_workers.py --json FILE`", "half an hour"),
    "planner": ("`python bench/bench_plan.py --json FILE`", "six minutes"),
}

OPENING = """\
# Results

The experiments of the paper and our own, written by `make report` from the runs that are committed
under `bench/results`: no figure on this page is typed by hand. **Measured** are losses, weights,
bytes and times of the run that is named. **Counted** are updates, bytes and messages that follow
from a schedule or from shapes. **Simulated** are times of schedules on devices that nobody had,
from measured or assumed work of the stages. **Published** are figures of the paper's authors; they
are not ours, and stand apart from them. Nothing here has been measured on a GPU."""


def evidence() -> dict[str, ModuleType]:
    return {name: import_module(f".{name}", __package__) for name in EVIDENCE}


def text(results: Path) -> str:
    """All of docs/results.md."""
    sections = {name: module.section(results).strip() for name, module in evidence().items()}
    again = [[_link(section), *EVIDENCE[name]] for name, section in sections.items()]
    made = table("section|made again by|on two cores", again)
    return "\n\n".join([OPENING, made, *sections.values()]) + "\n"


def _link(section: str) -> str:
    """To the section's heading, as code hosts and the site name it."""
    title = section.partition("\n")[0].removeprefix("## ")
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{title}](#{anchor})"


def draw(results: Path, folder: Path) -> None:
    """Every section's picture into a folder."""
    for module in evidence().values():
        if hasattr(module, "draw"):
            module.draw(results, folder)


def pictures_wrong(results: Path, folder: Path) -> list[str]:
    """What is amiss with pictures: missing, not linked, or without words for who cannot see them.

    Bits are not compared: another matplotlib draws others.
    """
    linked = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", text(results))
    there = {path.name for path in folder.glob("results-*.png")}
    wrong = [f"{name}: no description" for alt, name in linked if not alt.strip()]
    for _, name in linked:
        if not ((DOCS if "/" in name else folder) / name).exists():
            wrong.append(f"{name}: not drawn")
    return wrong + [f"{name}: not linked" for name in sorted(there - {n for _, n in linked})]
