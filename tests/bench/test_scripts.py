"""Tests that the script which measures processes runs and says what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_distributed
import pytest
from helpers.ranks import run_said


@pytest.mark.processes
def test_two_processes_beside_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    arguments = ["bench_distributed.py", "--ranks", "2", "--quick", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(bench_distributed, "spawned", run_said)
    bench_distributed.main()
    found = json.loads(path.read_text())
    figures = found["ranks"]["2"]["microbatches_per_second"]
    assert {"ideal", "auto, M = 2", "torch 1F1B, M = 2", "DDP, M = 2"} <= set(figures)
    assert all(len(each) == 1 and each[0] > 0 for each in figures.values())
    assert found["command"] == "python bench/bench_distributed.py --ranks 2 --quick --json FILE"
    assert "| spectrain | " in capsys.readouterr().out
