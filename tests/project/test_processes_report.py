"""Tests bench/report/processes.py: ratios are taken round by round, and text matches figures."""

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


def tried(shares: dict[str, float]) -> dict[str, Any]:
    counted = {"period": 25.0, "cpu": {"own": 24.0, "gloo": 0.25}, "page faults": 3.0}
    actions = {"FORWARD": 10.0, "BACKWARD": 12.0, "UPDATE": 2.0}
    profile = {name: {**counted, "actions": actions} for name in ("ideal", "vanilla", "spectrain")}
    found = {name: rounds(0.9) for name in ("vanilla", "spectrain", "pipedream")}
    found |= {"ideal": rounds(1.0), "split backward": rounds(0.945)}
    heap = {"microbatches_per_second": found, "profiles": [profile, profile]}
    return {
        "options": {"count": 32},
        "microbatches_per_second": found,
        "profiles": [profile, profile],
        "simulated": {"split backward": 1.0},
        "heaps": {"as glibc does": [heap], "kept": [heap]},
    }


DOCUMENTS = {
    "2026-11-24-processes/measured.json": measured,
    "2026-11-22-throughput/trials.json": tried,
}


def test_ratios_within_rounds(tmp_path: Path) -> None:
    given = {"spectrain_3": 0.99, "torch_1F1B_3": 0.9, "spectrain": 0.96, "torch_1F1B_2": 0.6}
    text = processes.section(results(tmp_path, *DOCUMENTS, **given))
    # a ratio of medians would ignore that a slow round is slow for all
    assert "| `spectrain` | 96 % (96 to 96) | 96 % (96 to 96) | 96 % (96 to 96) |" in text
    row = "| `spectrain`, M = N | 80 % (80 to 80) | 99 % (99 to 99) | 80 % (80 to 80) |"
    assert row in text
    assert "| `spectrain`, wide window | 80 % | 1.20 |" in text
    assert "of `auto`\n1.33 with 2, 0.89 with 3 and 1.00 with 4 processes" in text
    assert "of `spectrain` 1.33 with 2, 1.10 with 3 and 1.00 with 4." in text
    one = "| torch.distributed.pipelining 1F1B, M = 2, 4, 8, 16 | 60, 80, 80, 80 % |"
    assert f"{one} 1.60, 1.20, 1.20, 1.20 | 1.33, 1.00, 1.00, 1.00 |" in text
    assert (
        "the gradient of the input sent before those of the weights | 94.5 % | 1.050 (1.0" in text
    )
    assert "| 1.000 | throughput |" in text
    assert "takes 8 % and 8 % of a minibatch" in text


@pytest.mark.parametrize(("share", "word"), [(0.96, "reached"), (0.94, "missed")])
def test_targets(tmp_path: Path, share: float, word: str) -> None:
    text = processes.section(results(tmp_path, *DOCUMENTS, spectrain=share))
    assert f"95 % of the ideal ({word}: {100 * share:.1f} %)" in text
