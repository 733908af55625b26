"""Tests means and gaps of bench/report; test_evidence.py sees any change of another table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report import quality

ENDS: dict[str, list[float | None]] = {
    "sync": [0.50, 0.52, 0.54],
    "data-parallel-4": [0.50, 0.51, 0.55],
    "vanilla": [0.40, 0.425, 0.44],
    "pipedream": [0.44, 0.46, 0.485],
    "spectrain": [0.47, 0.49, 0.51],
    "spectrain-stash": [0.44, 0.47, 0.48],
    "pipeoptim": [None, 0.5, 0.5],
    "auto": [0.49, 0.52, 0.55],
    "auto-4": [0.52, 0.54, 0.56],
}


def test_means_and_gaps_are_of_the_runs(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    (tmp_path / quality.PAPER).mkdir()
    text = {name: ends for name, ends in ENDS.items() if name != "data-parallel-4"}
    for model, contenders in (("vgg16", ENDS), ("lstm", text)):
        rows = [
            {
                "contender": name,
                "losses": [None if share is None else 2.0 - share for share in shares],
                "accuracies": [share or 0.0 for share in shares],
            }
            for name, shares in contenders.items()
        ]
        path = tmp_path / quality.PAPER / f"{model}.json"
        path.write_text(json.dumps({"rows": rows}))
    lines = quality.accuracies(tmp_path).splitlines()
    # a standard deviation of 2 points in three seeds: 4.303 * 2 / sqrt(3)
    assert "| `sync` | 52.0 ± 5.0 | 52.0 ± 5.0 |" in lines
    assert "| `data-parallel-4` | 52.0 ± 6.6 | as `sync` |" in lines
    assert "| `pipeoptim` | 1 of 3 diverged | 1 of 3 diverged |" in lines
    lines = quality.gaps(tmp_path).splitlines()
    for line in (
        "| `auto-4` - `sync` | **+2.0 [+2.0, +2.0]** | **+2.0 [+2.0, +2.0]** |",
        "| `vanilla` - `sync` | **-9.8 [-10.6, -9.1]** | **-9.8 [-10.6, -9.1]** |",
        "| `auto` - `sync` | +0.0 [-2.5, +2.5] | +0.0 [-2.5, +2.5] |",
        "| `data-parallel-4` - `sync` | +0.0 [-2.5, +2.5] |  |",
        "| `pipeoptim` - `sync` | diverged | diverged |",
    ):
        assert line in lines
