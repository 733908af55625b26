"""Tests the tables of bench/report on small runs with known results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from report import RESULTS, quality, speed

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


def _written(folder: Path, name: str, document: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


class TestAccuracy:
    @pytest.fixture
    def results(self, tmp_path: Path) -> Path:
        pytest.importorskip("scipy")
        shutil.copytree(RESULTS / "published", tmp_path / "published")
        text = {name: ends for name, ends in ENDS.items() if name != "data-parallel-4"}
        for model, ends in (("vgg16", ENDS), ("lstm", text)):
            rows = [
                {
                    "contender": name,
                    "losses": [None if share is None else 2.0 - share for share in shares],
                    "accuracies": [share or 0.0 for share in shares],
                }
                for name, shares in ends.items()
            ]
            _written(tmp_path, f"{quality.PAPER}/{model}.json", {"rows": rows})
        return tmp_path

    def test_means_and_gaps_are_of_the_runs(self, results: Path) -> None:
        lines = quality.accuracies(results).splitlines()
        # a standard deviation of 2 points in three seeds: 4.303 * 2 / sqrt(3)
        assert "| `sync` | 52.0 ± 5.0 | 52.0 ± 5.0 |" in lines
        assert "| `data-parallel-4` | 52.0 ± 6.6 | as `sync` |" in lines
        lines = quality.gaps(results).splitlines()
        for line in (
            "| `auto-4` - `sync` | **+2.0 [+2.0, +2.0]** | **+2.0 [+2.0, +2.0]** |",
            "| `vanilla` - `sync` | **-9.8 [-10.6, -9.1]** | **-9.8 [-10.6, -9.1]** |",
            "| `auto` - `sync` | +0.0 [-2.5, +2.5] | +0.0 [-2.5, +2.5] |",
            "| `data-parallel-4` - `sync` | +0.0 [-2.5, +2.5] |  |",
        ):
            assert line in lines

    def test_what_diverged_has_no_mean(self, results: Path) -> None:
        lines = quality.accuracies(results).splitlines()
        assert "| `pipeoptim` | 1 of 3 diverged | 1 of 3 diverged |" in lines
        assert "| `pipeoptim` - `sync` | diverged | diverged |" in quality.gaps(results)

    def test_the_published_table(self, results: Path) -> None:
        assert "| VGG16 | CIFAR-10 | 91.10 | 90.81 |" in quality.published(results)


class TestProcesses:
    """Runs of three rounds; in the second the machine has half the speed."""

    @pytest.fixture
    def results(self, tmp_path: Path) -> Path:
        shares = {"spectrain": 0.96, "spectrain, M = 3": 0.99, "torch 1F1B, M = 3": 0.9}
        shares["torch 1F1B, M = 2"] = 0.6
        ranks = {}
        for n in (2, 3):
            named = [f"{name}, M = {m * n}" for name in speed._NAMES for m in (1, 2)]
            each = {name: shares.get(name, 0.8) for name in (*speed._PLAIN, *named)}
            each["ideal"] = 1.0
            figures = {name: [100 * s, 50 * s, 200 * s] for name, s in each.items()}
            ranks[str(n)] = {"microbatches_per_second": figures}
        _written(tmp_path, speed.PROCESSES, {"ranks": ranks})
        return tmp_path

    def test_ratios_are_taken_within_rounds(self, results: Path) -> None:
        """A ratio of medians would ignore that a slow round is slow for all."""
        text = speed.processes(results)
        assert "| `spectrain` | 96 % (96 to 96) | 96 % (96 to 96) |" in text
        assert "| `spectrain`, M = N | 80 % (80 to 80) | 99 % (99 to 99) |" in text
        found = speed.over_torch(results)
        assert found == pytest.approx([0.8 / 0.6, 1.0, 0.8 / 0.9, 1.0])


def test_planned_against_real(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        **{"planned": [0.05, 0.052], "measured": [0.06, 0.05]},
        **{"planned_work": [0.1, 0.1], "measured_work": [0.1, 0.1]},
    }
    run = {"processes": 2, "rows": [row, {**row, "planned": [1, 1]}]}
    _written(tmp_path, speed.PLAN, {"runs": [run]})
    assert "| 2 processes | 2 | 1 | 870 % | 1733 % | 0 | 0 |" in speed.planner(tmp_path)


def test_prediction_errors_are_of_the_median_stage(tmp_path: Path) -> None:
    laws = {"stale": [2.0, 4.0, 1.0], "linear": [1.0, 1.0, 0.9]}
    laws |= {law: laws["stale"] for law in ("geometric", "second-order")}
    rows = [{"ahead": 1, "law": law, "stages": {"mean": mean}} for law, mean in laws.items()]
    case = {"data": "digits", "microbatches": 1, "stages": 8, "rows": rows}
    document = {"horizons": [1], "cases": [case, {**case, "stages": 4}]}
    _written(tmp_path, "2026-11-22-errors/errors.json", document)
    lines = quality.errors(tmp_path).splitlines()
    assert lines[0] == "| s | law | digits, M = 1 |" and lines[2] == "| 1 | linear | 0.50 |"
