"""Tests a stage's counted bytes against the actual ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_cost import (
    ALIGNMENT,
    STAGES,
    main,
    memory,
    moved,
    stages_of,
)
from report import speed
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method, microbatches_of, rules_at

WIDTH = 32


@pytest.fixture
def alone() -> Iterator[None]:
    """Hide tensors of other tests from the list of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


def sgd(params: Any, **more: bool) -> st.optim.SGD:
    return st.optim.SGD(params, lr=1e-3, momentum=0.9, **more)


def cases() -> Iterator[tuple[str, int, int, bool]]:
    """(method, stages, microbatches, whether with AdamW): one microbatch, and the usual number."""
    for name in st.methods():
        method = find_method(name)
        n = min(STAGES, method.max_stages or STAGES)
        usual = microbatches_of(method, n)
        for m in {1, usual} if method.min_microbatches is None else {usual}:
            yield from ((name, n, m, adam) for adam in {False, "adamw" in method.families})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("name", "n", "m", "adam"), list(cases()))
def test_storages_are_what_the_ledger_counts(name: str, n: int, m: int, adam: bool) -> None:
    """Every stage agrees to the byte; buffers only have additional alignment."""
    method = find_method(name)
    pipe = st.Pipeline(
        stages_of(WIDTH)[:n],
        st.optim.AdamW if adam else lambda params: sgd(params, smoothed=method.smoothed),
        nn.functional.mse_loss,
        method,
        microbatches=m,
    )
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


@pytest.mark.parametrize(
    ("method", "update", "loads"),
    [
        ("sync", [20] * 4, [0] * 4),
        ("vanilla", [20] * 4, [0] * 4),
        # an update that would overwrite a needed version copies it first
        ("pipedream", [28, 28, 28, 20], [0] * 4),
        # the step writes the forward's prediction; the backward's is another pass if there is one
        ("spectrain", [24] * 4, [0, 0, 12, 0]),
        ("spectrain-stash", [24, 24, 24, 20], [0] * 4),
        ("auto", [24] * 4, [0] * 4),
    ],
)
def test_bytes_of_a_minibatch(method: str, update: list[int], loads: list[int]) -> None:
    """Per parameter, in float32, with SGD; AdamW reads and writes another moment."""
    for optimizer, step, state in (("sgd", 0, 0), ("adamw", 8, 4)):
        found = moved(method, 1, optimizer)
        assert [stage["update"] for stage in found] == [b + step for b in update]
        predicts = [b + state * (b == 12) for b in loads]
        assert [stage["loads"] for stage in found] == predicts


def test_a_run_from_the_command_to_the_document(tmp_path: Path) -> None:
    path = tmp_path / speed.COST
    sizes = ["--width", str(WIDTH), "--batches", "2", "3", "--minibatches", "1", "--rounds", "1"]
    assert main([*sizes, "--json", str(path)]) == 0
    memory = speed.memory(tmp_path)
    assert "| `pipedream` | 1 | 4, 3, 2, 1 | 0.0, 0.1, 0.1, 0.1 | " in memory
    time = speed.update(tmp_path)
    assert "| SGD | `spectrain` | 1 | 1.2, 1.2, 1.8, 1.2 | " in time and "`sync`" not in time
    plain = memory.splitlines()[2]
    assert plain.startswith("| `sync` | 1 | 1, 1, 1, 1 |") and plain.endswith("| 0% | 0% |")
