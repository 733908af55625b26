"""Tests bench/report/processes.py: ratios are taken round by round; verdicts match figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report import processes


def results(folder: Path, *documents: str, **shares: float) -> Path:
    """Runs of three rounds; in the second the machine has half the speed."""
    for name in documents:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(DOCUMENTS[name](shares)))
    return folder


def rounds(share: float) -> list[float]:
    return [100 * share, 50 * share, 200 * share]


def figures(ranks: int, shares: dict[str, float]) -> dict[str, list[float]]:
    ms = (2, 4, 8, 16) if ranks == 2 else (ranks, 2 * ranks)
    names = ["vanilla", "spectrain", "pipedream", "spectrain, wide window"]
    for first in (
        "auto",
        "spectrain",
        "1F1B",
        "torch 1F1B",
        "GPipe",
        "torch GPipe",
        "replicas",
        "DDP",
    ):
        names += [f"{first}, M = {m}" for m in ms]
    given = {name: shares.get(name.replace(", M = ", "_").replace(" ", "_"), 0.8) for name in names}
    return {"ideal": rounds(1.0), **{name: rounds(share) for name, share in given.items()}}


def measured(shares: dict[str, float]) -> dict[str, Any]:
    about = {"command": "run it", "date": "2026-11-22", "cpu": "a cpu", "cores": 2, "torch": "2.13"}
    ranks = {
        str(n): {
            "blocks": 96 // n,
            "options": {"batch": 64},
            "microbatches_per_second": figures(n, shares),
        }
        for n in (2, 3, 4)
    }
    return {**about, "ranks": ranks}


DOCUMENTS = {
    "2026-11-24-processes/measured.json": measured,
}


def test_ratios_within_rounds(tmp_path: Path) -> None:
    given = {"spectrain_3": 0.99, "torch_1F1B_3": 0.9, "spectrain": 0.96, "torch_1F1B_2": 0.6}
    folder = results(tmp_path, *DOCUMENTS, **given)
    text = processes.section(folder)
    # a ratio of medians would ignore that a slow round is slow for all
    assert "| `spectrain` | 96 % (96 to 96) | 96 % (96 to 96) | 96 % (96 to 96) |" in text
    row = "| `spectrain`, M = N | 80 % (80 to 80) | 99 % (99 to 99) | 80 % (80 to 80) |"
    assert row in text
    text = processes.two_processes(folder)
    assert "| `spectrain`, wide window | 80 % | 1.20 |" in text
    one = "| torch.distributed.pipelining 1F1B, M = 2, 4, 8, 16 | 60, 80, 80, 80 % |"
    assert f"{one} 1.60, 1.20, 1.20, 1.20 | 1.33, 1.00, 1.00, 1.00 |" in text
    assert processes.over_torch(folder) == "0.89 to 1.33 times"
    assert processes.share(folder, "spectrain", "vanilla") == "120.0 %"


@pytest.mark.parametrize(("share", "word"), [(0.96, "yes"), (0.94, "**no**")])
def test_targets(tmp_path: Path, share: float, word: str) -> None:
    text = processes.targets(results(tmp_path, *DOCUMENTS, spectrain=share))
    assert f"| the ideal | >= 95 % | {100 * share:.1f} % | {word} |" in text
