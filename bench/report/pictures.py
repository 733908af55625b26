"""The pictures that the report draws into docs/, and a check of all pictures that pages show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from . import accuracy, races

DRAWN: dict[str, Callable[[Path, Path], None]] = {
    "results-accuracy.png": accuracy.draw,
    "results-quality.png": races.draw,
}


def draw(results: Path, folder: Path) -> None:
    """Draw all of them into a folder."""
    for name, draw_one in DRAWN.items():
        draw_one(results, folder / name)


def wrong(pages: Iterable[Path], folder: Path) -> list[str]:
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
