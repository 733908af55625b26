"""Command line: write the tables into the documents, or report those that are out of date."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from . import DOCS, RESULTS, documents, nanogpt, races, wires


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 where `--check` finds something."""
    parser = argparse.ArgumentParser(
        prog="python -m report", description="Write the documents' tables from committed runs."
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--no-pictures", action="store_true", help="write text only")
    arguments = parser.parse_args(argv)
    if not (arguments.check or arguments.no_pictures):
        if importlib.util.find_spec("matplotlib"):
            races.draw(RESULTS, DOCS / "results-quality.png")
            nanogpt.draw(RESULTS, DOCS / "nanogpt.png")
            wires.draw(RESULTS, DOCS / "slow-links-measured.png")
        else:
            print("the pictures stay as they are: no matplotlib", file=sys.stderr)
    stale = []
    for path in documents.pages():
        text = path.read_text()
        new = documents.written(text, RESULTS)
        if new != text:
            stale.append(path.name)
            if not arguments.check:
                path.write_text(new)
    wrong = documents.wrong_pictures(documents.pages(), DOCS) + documents.naked_figures()
    if arguments.check and stale:
        wrong.append(f"{', '.join(stale)}: run make report")
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
