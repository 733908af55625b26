"""Tests the page of the accuracy study against its JSON file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from report import accuracy, hybrid

pytest.importorskip("scipy")

ROOT = Path(__file__).resolve().parents[2]

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


def _document(lr: float, ends: dict[str, list[float | None]], **settings: Any) -> dict[str, Any]:
    return {
        "updates": 400,
        "settings": {"data": "cifar10", "model": "vgg16", "width": 8, "batch_size": 32, "lr": lr}
        | settings,
        "parameters": {"4": [1000, 2000, 3000, 4000]},
        "date": "2026-01-02",
        "cpu": "a CPU, family 1",
        "versions": {"torch": "2.0"},
        "rows": [
            {
                "contender": name,
                "losses": [None if share is None else 2.0 - share for share in shares],
                "accuracies": [share or 0.0 for share in shares],
            }
            for name, shares in ends.items()
        ],
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "bench" / "results" / "published", tmp_path / "published")
    folder = tmp_path / accuracy.FOLDER
    folder.mkdir()
    text = {name: ends for name, ends in ENDS.items() if name != "data-parallel-4"}
    for name, document in (
        ("vgg16", _document(0.01, ENDS)),
        ("lstm", _document(0.25, text, data="text", model="lstm", batch_size=16)),
        ("lstm-twice", _document(0.5, {name: ends[:1] for name, ends in text.items()})),
    ):
        (folder / f"{name}.json").write_text(json.dumps(document))
    rates = {name: {"0.01": {"loss": 1.5, "accuracy": 0.5}} for name in ("vgg16", "lstm")}
    (folder / "rates.json").write_text(json.dumps({"rates": rates}))
    return tmp_path


def _line(page: str, begin: str, number: int = 0) -> str:
    return [line for line in page.splitlines() if line.startswith(begin)][number]


def test_means_and_gaps_are_of_the_runs(results: Path) -> None:
    page = accuracy.accuracies(results)
    # a standard deviation of 2 points in three seeds: 4.303 * 2 / sqrt(3)
    assert _line(page, "| `sync`") == "| `sync` | 52.0 ± 5.0 | 52.0 ± 5.0 |"
    assert _line(page, "| `data-parallel-4`") == "| `data-parallel-4` | 52.0 ± 6.6 | as `sync` |"
    page = accuracy.gaps(results)
    for line in (
        "| `auto-4` - `sync` | **+2.0 [+2.0, +2.0]** | **+2.0 [+2.0, +2.0]** |",
        "| `vanilla` - `sync` | **-9.8 [-10.6, -9.1]** | **-9.8 [-10.6, -9.1]** |",
        "| `auto` - `sync` | +0.0 [-2.5, +2.5] | +0.0 [-2.5, +2.5] |",
        "| `data-parallel-4` - `sync` | +0.0 [-2.5, +2.5] |  |",
    ):
        assert line in page
    assert "| `spectrain` - `pipedream` | **+" in page
    page = accuracy.models(results)
    assert "| VGG16 | CIFAR-10 | 8 | 1 + 2 + 3 + 4 | 400 of 32 | sgd, 0.01 | 3 |" in page
    assert accuracy.between(results, "vanilla", "sync", "vgg16") == "-9.8 [-10.6, -9.1]"


def test_what_diverged_has_no_mean(results: Path) -> None:
    page = accuracy.accuracies(results)
    assert _line(page, "| `pipeoptim`") == "| `pipeoptim` | 1 of 3 diverged | 1 of 3 diverged |"
    assert "| `pipeoptim` - `sync` | diverged | diverged |" in accuracy.gaps(results)
    assert _line(accuracy.twice(results), "| `pipeoptim`") == "| `pipeoptim` | diverged |"


def test_the_published_table(results: Path) -> None:
    assert "| VGG16 | CIFAR-10 | 91.10 | 90.81 |" in accuracy.published(results)
    means = "vanilla -2.13, PipeDream -1.70, SpecTrain v1 -1.20, SpecTrain v2 -1.31"
    assert accuracy.published_means(results) == means
    assert "| ResNet-362 | 93.46 | 90.53 | 93.98 |" in hybrid.published(results)


def test_tables_of_stale_weights(tmp_path: Path) -> None:
    folder = tmp_path / hybrid.FOLDER
    folder.mkdir()
    ends: dict[str, list[float | None]] = {
        "sync": [0.50, 0.52, 0.54],
        "stale": [0.40, 0.425, 0.44],
        "hybrid": [0.47, 0.49, 0.51],
        "auto": [None, 0.52, 0.55],
    }
    document = _document(0.1, ends)
    for stages, name in ((4, "resnet-20"), (2, "resnet-20-two-stages")):
        for row in document["rows"]:
            row["stages"] = stages
        (folder / f"{name}.json").write_text(json.dumps(document))
    page = hybrid.accuracies(tmp_path)
    assert _line(page, "| method").endswith(" | ResNet-20, N = 4 | ResNet-20, N = 2 |")
    assert _line(page, "| `hybrid`").endswith("| 49.0 ± 5.0 | 49.0 ± 5.0 |")
    page = hybrid.gaps(tmp_path)
    assert _line(page, "| `stale` - `sync`").endswith(" | **-9.8 [-10.6, -9.1]** |")
    assert "| `auto` - `hybrid` | diverged | diverged |" in page


def test_the_picture(results: Path) -> None:
    pytest.importorskip("matplotlib")
    accuracy.draw(results, results / "results-accuracy.png")
    assert (results / "results-accuracy.png").read_bytes().startswith(b"\x89PNG")
