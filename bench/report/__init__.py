"""What the documents claim, from committed runs: `make report`, or `python -m report` in bench/.

Every module of `page.EVIDENCE` is a section of docs/results.md, from the JSON of bench/results:

    section(results) -> str               Markdown from its "## " heading on
    draw(results, folder) -> None         its picture into that folder, where it has one
"""

from pathlib import Path

import root  # noqa: F401  # finds studies

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"
