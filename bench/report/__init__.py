"""Tables and pictures of the documents from committed runs: `make report`.

Pages name tables between marks (see `documents`); `tables.TABLES` maps these names to functions of
this package, which read the JSON files of bench/results.
"""

import json
from pathlib import Path
from typing import Any

import root  # noqa: F401  # finds studies

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"


def read(results: Path, name: str) -> Any:
    """Return the content of a file of results."""
    return json.loads((results / name).read_text())
