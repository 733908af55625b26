"""Tests a stage's counted bytes against the actual ones."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench_cost import ALIGNMENT, STAGES, main, memory, stages_of
from report import speed
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method, rules_at

WIDTH = 32


@pytest.mark.parametrize(
    ("name", "m", "adam"),
    [("pipedream", 1, False), ("spectrain", 1, True), ("auto", 4, True), ("gap-aware", 1, False)],
)
def test_storages_are_what_the_ledger_counts(
    name: str, m: int, adam: bool, request: pytest.FixtureRequest
) -> None:
    """Every stage agrees to the byte; buffers only have additional alignment."""
    gc.freeze()  # hides tensors of other tests from the list of objects
    request.addfinalizer(gc.unfreeze)
    method, n = find_method(name), STAGES
    sgd = partial(st.optim.SGD, lr=1e-3, momentum=0.9, smoothed=method.smoothed)
    optimizer: Any = st.optim.AdamW if adam else sgd
    stages = stages_of(WIDTH)[:n]
    pipe = st.Pipeline(stages, optimizer, nn.functional.mse_loss, method, microbatches=m)
    found = memory(pipe, WIDTH)
    assert [stage["parameters"] for stage in found] == [
        (WIDTH + 32 * k) * (WIDTH + 32 * (k + 1)) for k in range(n)
    ]
    for stage, theirs, place in zip(found, pipe.measured_memory(), pipe.places, strict=True):
        correction = rules_at(method, place).correction
        more = 0 if correction is None else len(correction.buffers)  # gap-aware's average
        size = 4 * stage["parameters"]
        assert stage["counted_bytes"] == size * stage["counted_versions"]
        assert stage["measured_bytes"] == stage["counted_bytes"] + ALIGNMENT * stage["buffers"]
        assert stage["buffers"] == stage["counted_versions"] == theirs.versions
        assert theirs.weight_bytes == stage["counted_bytes"]
        assert stage["state_bytes"] == size * ((2 if adam else 1) + more)
    assert pipe.weight_version_bytes == sum(stage["counted_bytes"] for stage in found)


def test_a_run_from_the_command_to_the_document(tmp_path: Path) -> None:
    path = tmp_path / speed.COST
    sizes = ["--width", str(WIDTH), "--batches", "2", "3", "--minibatches", "1", "--rounds", "1"]
    assert main([*sizes, "--json", str(path)]) == 0
    memory = speed.memory(tmp_path)
    assert "| `pipedream` | 1 | 4, 3, 2, 1 | 0.0, 0.1, 0.1, 0.1 | " in memory
    time = speed.update(tmp_path)
    # Pipedream's update copies a version that is still needed; spectrain's writes the forward's
    # prediction, and one stage's backward takes another pass.
    assert "| SGD | `pipedream` | 1 | 1.4, 1.4, 1.4, 1.0 | " in time
    assert "| SGD | `spectrain` | 1 | 1.2, 1.2, 1.8, 1.2 | " in time
    assert "| AdamW | `spectrain` | 1 | 1.1, 1.1, 1.7, 1.1 | " in time and "`sync`" not in time
    plain = memory.splitlines()[2]
    assert plain.startswith("| `sync` | 1 | 1, 1, 1, 1 |") and plain.endswith("| 0% | 0% |")
