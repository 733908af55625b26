"""Tests the slow-link study: searched rates, steps compared by seed, simulated seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from studies import slow_links, study
from studies.slow_links import Way, best_of, chains_of, rows_of, search_chain, seconds_per_step
from studies.study import Cell, Curve

#: Updates to the goal relative to synchronous training; a run ends after 1.5.
NEEDED = {"sync": 1.0, "auto": 1.0, "pipedream-2bw": 1.25, "vanilla": 1.7}
CODED = {"bfloat16": 1.0, "int8": 1.0, "int4-hadamard": 1.1}


def _train(cell: Cell, lr: float, seed: int, make: object) -> Curve:
    """A linearly falling loss; 4 % faster with the best rate than with one a factor of two away."""
    away = abs(math.log2(lr / cell.settings.lr / 2))
    slower = NEEDED[cell.contender] * CODED[str(cell.settings.codec)] + 0.04 * away
    slower *= 1.0 if cell.settings.rank is None else 2.0
    points = [(u, 4.0 - u / (120 * slower), 0.5) for u in range(15, 361, 15)]
    return Curve(tuple(points), 1.0)


def test_what_reaches_the_loss_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "train", _train)
    monkeypatch.setattr(study, "maker_in", lambda settings, folder: None)
    shown = {"1f1b": (8, 64), "zb-h1": (8,), "pipedream-2bw": (8,), "auto": (8, 32)}
    monkeypatch.setattr(slow_links, "SHOWN", {**shown, "vanilla": (8,)})
    data = tmp_path / "text.txt"
    data.write_text("text")
    found: dict[Way, float] = {}
    for ways in chains_of("muon"):
        found |= search_chain(tmp_path, data, ways)
    assert set(found.values()) == {0.05}, "twice the setting's own"
    for way in found:
        study.run_one(tmp_path, way.cell(data), 0.05, 1)
    rows = rows_of(tmp_path, data, found, 2)
    by = {(row.method, row.microbatches, row.way.name): row for row in rows}
    assert by["1f1b", 64, "bfloat16"].steps == (1.0, 1.0)
    assert by["1f1b", 64, "bfloat16"].time == pytest.approx(1.0)
    assert by["zb-h1", 8, "int8"].steps == pytest.approx((1.0, 1.0))
    assert by["auto", 8, "int4-hadamard"].interval.mean == pytest.approx(1.1, rel=0.01)
    assert by["vanilla", 8, "bfloat16"].time == math.inf
    for row in rows:
        seconds = seconds_per_step(row.method, row.microbatches, row.way.token_bytes)
        yardstick = seconds_per_step("1f1b", 64, 2048)
        assert row.seconds == seconds
        assert row.time == pytest.approx(row.interval.mean * seconds / yardstick)
    best = {(row.method, row.way.name): row for row in best_of(rows)}
    assert best["1f1b", "bfloat16"].microbatches == 64
    assert best["auto", "int8"].time < best["1f1b", "int8"].time < best["1f1b", "bfloat16"].time
    assert ("auto", "subspace") in best
    slow_links.write(tmp_path, data, rows, 2)
    document = json.loads((tmp_path / "slow-links.json").read_text())
    assert len(document["rows"]) == len(rows)
    assert (tmp_path / "slow-links-muon.png").stat().st_size > 10_000


def test_bytes_of_a_token_at_the_benchmarks_sizes() -> None:
    sizes = {codec: Way("adamw", "sync", 1, codec).token_bytes for codec in slow_links.CODECS}
    assert sizes == {"bfloat16": 2048, "int8": 1056, "int4-hadamard": 544}
    assert Way("muon", "sync", 1, "bfloat16", 10).token_bytes == 322


def test_seconds_per_step_are_near_those_that_were_published() -> None:
    """Of 1F1B: the two records of PluralisResearch/ProtocolNanoGPT, commit 0551bc3."""
    for microbatches, token_bytes, seconds in ((64, 2048, 100.475), (32, 322, 19.889)):
        found = seconds_per_step("1f1b", microbatches, token_bytes)
        assert found == pytest.approx(seconds, rel=0.05)
