"""Tests random changes of checkpoints, results, traces and schedules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def campaign(seed: str, count: int, seconds: int) -> dict[str, Any]:
    """Run the changes in a separate process with limited memory."""
    done = subprocess.run(
        [sys.executable, "-m", "helpers.hostile_files", seed, str(count), str(seconds)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["slowest"] < 10  # seconds of one case
    return told


@pytest.mark.processes
def test_a_few() -> None:
    told = campaign("a few", 24, 60)
    assert sum(told["ended"].values()) == 24


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(2))
def test_thousands(part: int) -> None:
    told = campaign(f"part {part}", 100_000, 600)
    assert sum(told["ended"].values()) > 3000
