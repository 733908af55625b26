"""Figures of the documents from committed runs: `make report`, or `python -m report` in bench/.

Pages name figures between marks (see `documents`); `figures.FIGURES` maps these names to functions
of this package, which read the JSON files of bench/results.
"""

from pathlib import Path

import root  # noqa: F401  # finds studies

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"
