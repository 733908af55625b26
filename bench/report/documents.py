"""The documents and their figures: `figures.py` writes the text between two marks.

    takes <!--f digits.time 1f1b-->1.5 times<!--/f--> as long

The marks are comments: neither a code host nor the site shows them. A text of several lines stands
between marks on lines of their own. `naked` finds figures outside of marks. A figure that was not
measured here (a target, a setting, a published value with its source, arithmetic) has its own
marks: <!--set-->64 KB<!--/set-->.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from . import DOCS, ROOT
from .figures import FIGURES

_MARK = re.compile(r"<!--f ([^>]+?)-->(.*?)<!--/f-->", re.DOTALL)
_SET = re.compile(r"<!--set-->(.*?)<!--/set-->", re.DOTALL)
#: Not checked: code, targets of links, numbers of versions and of papers.
_CODE = re.compile(r"^( *)(```|:::).*?^\1\2|^(?:    |\t).*?$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_OTHER = re.compile(
    r"\]\([^)\n]*\)|<?https?://\S+|arXiv [\d.]+"
    r"|(?:torch|[Pp]ython|GCC|nvcc|CUDA) [\d.]+(?:, [\d.]+)*(?: (?:or|to|and) [\d.]+)*"
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
    """README and the pages of docs/."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def written(text: str, results: Path) -> str:
    """Return the text with the figures of the committed runs between its marks.

    Raises:
        ValueError: a mark is unknown, has no end, or begins a line of prose, which Markdown would
            then take for HTML.
    """
    found = _MARK.findall(text)
    if not text.count("<!--f ") == text.count("<!--/f-->") == len(found):
        raise ValueError("marks: expected an end <!--/f--> after every <!--f NAME-->")
    for line in text.splitlines():
        if re.match(r"\s*(?:[-*>]\s+|\d+\.\s+)*<!--/?(?:f|set)\b", line) and not re.fullmatch(
            r"<!--(?:f [^>]+|/f)-->", line
        ):
            raise ValueError(f"marks: expected none at the beginning of a line, got {line!r}")

    def figure(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        if name not in FIGURES:
            raise ValueError(f"marks: expected one of {', '.join(FIGURES)}, got {name!r}")
        value = FIGURES[name](results, *arguments)
        around = "\n\n" if "\n" in value else ""
        return f"<!--f {match[1]}-->{around}{value}{around}<!--/f-->"

    return _MARK.sub(figure, text)


def naked(text: str) -> Iterator[tuple[int, str]]:
    """Find figures typed by hand, with a unit or a decimal point: yield their line and text."""
    for hidden in (_CODE, _MARK, _SET, _OTHER):
        text = hidden.sub(lambda match: "\n" * match[0].count("\n") + "#", text)
    for match in _NAKED.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def wanted(results: Path) -> dict[Path, str]:
    """Return the text that every document should have."""
    return {path: written(path.read_text(), results) for path in pages()}


def naked_figures() -> list[str]:
    """Find the figures typed by hand in all documents."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {what!r} is neither marked nor generated"
        for path in pages()
        for line, what in naked(path.read_text())
    ]
