"""The documents and their tables: `tables.py` writes what stands between two marks.

    <!--f errors-->

    | s | law | ...

    <!--/f-->

The marks are comments on lines of their own: neither a code host nor the site shows them. Prose has
no measured figures; it says in words what a table shows, and links to it. `naked` finds figures in
prose. A figure that was not measured here (a target, a setting, a published value with its source,
arithmetic) has its own marks: <!--set-->64 KB<!--/set-->.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import DOCS, RESULTS, ROOT
from .tables import TABLES

_MARK = re.compile(r"^<!--f ([^>\n]+)-->$(.*?)^<!--/f-->$", re.DOTALL | re.MULTILINE)
_SET = re.compile(r"<!--set-->(.*?)<!--/set-->", re.DOTALL)
#: Not checked: code, targets of links, numbers of versions and of papers.
_CODE = re.compile(r"^( *)(```|:::).*?^\1\2|^(?:    |\t).*?$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_OTHER = re.compile(
    r"\]\([^)\n]*\)|<?https?://\S+|arXiv [\d.]+"
    r"|(?:torch|[Pp]ython|NumPy|GCC|nvcc|CUDA) [\d.]+(?:, [\d.]+)*(?: (?:or|to|and) [\d.]+)*"
)
_UNITS = (
    "%|per cent|times|fold|x|[mnu]?s|µs|seconds?|minutes?|hours?|microseconds?|milliseconds?"
    "|[KMGT]i?B|bytes?|[KMG]b/s"
)
_NAKED = re.compile(
    rf"(?<![\w.^])(?:(?:\d[\d,]*(?:\.\d+)?|\.\d+) ?(?:{_UNITS})(?![\w-])"
    r"|\d*\.\d+(?:e-?\d+)?(?![\w.]))"
)


def pages() -> list[Path]:
    """README, the pages of docs/, and those beside the results."""
    beside = [RESULTS / name for name in ("TABLES.md", "FILES.md", "PROVENANCE.md")]
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *beside]


def written(text: str, results: Path) -> str:
    """Return the text with the tables of the committed runs between its marks.

    Raises:
        ValueError: a mark is unknown, has no end, or is not alone on its line; or a line of prose
            begins with a mark, which Markdown would then take for HTML.
    """
    if not text.count("<!--f ") == text.count("<!--/f-->") == len(_MARK.findall(text)):
        raise ValueError("marks: expected <!--f NAME--> and <!--/f--> on lines of their own")
    for line in text.splitlines():
        if re.match(r"\s*(?:[-*>]\s+|\d+\.\s+)*<!--/?set\b", line):
            raise ValueError(f"marks: expected none at the beginning of a line, got {line!r}")

    def table(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            raise ValueError(f"marks: expected one of {', '.join(TABLES)}, got {match[1]!r}")
        return f"<!--f {match[1]}-->\n\n{TABLES[match[1]](results)}\n\n<!--/f-->"

    return _MARK.sub(table, text)


def naked(text: str) -> Iterator[tuple[int, str]]:
    """Find figures typed by hand, with a unit or a decimal point: yield their line and text."""
    for hidden in (_CODE, _MARK, _SET, _OTHER):
        text = hidden.sub(lambda match: "\n" * match[0].count("\n") + "#", text)
    for match in _NAKED.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def naked_figures() -> list[str]:
    """Find the figures typed by hand in all documents."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {what!r} is neither marked nor generated"
        for path in pages()
        for line, what in naked(path.read_text())
    ]


def wrong_pictures(pages: Iterable[Path], folder: Path) -> list[str]:
    """Pictures that are missing, have no description, or are in the folder and on no page.

    The bits of pictures are not compared: they differ between versions of matplotlib.
    """
    found, shown = [], set()
    for page in pages:
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text()):
            path = (page.parent / target).resolve()
            shown.add(path)
            if not alt.strip():
                found.append(f"{path.name}: no description in {page.name}")
            if not path.exists():
                found.append(f"{path.name}: not drawn")
    unused = {path.resolve() for path in folder.glob("*.png")} - shown
    return found + [f"{path.name}: on no page" for path in sorted(unused)]
