"""Tests threads with less than a core each: by affinity, a quota, processes, or other work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext import threads
from spectrain_ext.threads import cores, crowded, disturbed, warn_of_threads

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Replace what this process sees of its machine."""

    def of(
        *,
        there: int = 4,
        torchs: int = 4,
        load: float = 0.0,
        quota: str = "",
        old_quota: object = None,
        ranks: object = None,
    ) -> None:
        monkeypatch.setattr(threads, "_CGROUP", tmp_path)
        if quota:
            (tmp_path / "cpu.max").write_text(f"{quota}\n")
        if old_quota is not None:
            (tmp_path / "cpu").mkdir()
            (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{old_quota}\n")
            (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        fake = SimpleNamespace(
            sched_getaffinity=lambda _: set(range(there)),
            getloadavg=lambda: (load, load, load),
            environ={} if ranks is None else {"LOCAL_WORLD_SIZE": str(ranks)},
        )
        monkeypatch.setattr(threads, "os", fake)
        monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)

    return of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 4),
        ({"quota": "max 100000"}, 4),
        ({"quota": "150000 100000"}, 2),
        ({"quota": "50000 100000"}, 1),
        ({"old_quota": -1}, 4),
        ({"old_quota": 300000}, 3),
        ({"old_quota": ""}, 4),
    ],
)
def test_a_containers_quota(machine: Machine, given: dict[str, object], expected: int) -> None:
    machine(**given)
    assert cores() == expected


@pytest.mark.parametrize(
    ("given", "what", "remedy"),
    [
        ({}, None, ""),
        ({"there": 2, "torchs": 8}, "8 threads on 2 cores", "set_num_threads(2)"),
        ({"quota": "100000 100000"}, "4 threads on 1 core.", "OMP_NUM_THREADS=1 "),
        ({"torchs": 2, "ranks": 2}, None, ""),
        ({"torchs": 3, "ranks": 2}, "2 processes share 4 cores, and", "NUM_THREADS=2 "),
        ({"torchs": 1, "ranks": 8}, "8 processes share 4 cores.", "at most 4 of them"),
        ({"torchs": 2, "ranks": 8}, "2 threads in each", "OMP_NUM_THREADS=1 "),
        ({"ranks": "many"}, None, ""),
    ],
)
def test_more_threads_than_cores(
    machine: Machine, given: dict[str, object], what: str | None, remedy: str
) -> None:
    machine(**given)
    found = crowded()
    assert (found is None) == (what is None)
    assert found is None or (str(what) in found.what and remedy in found.remedy)


def test_other_work(machine: Machine) -> None:
    for load, torchs, noticed in ((0.3, 4, False), (8.0, 1, False), (8.0, 4, True)):
        machine(load=load, torchs=torchs)
        found = disturbed()
        assert (found is not None) == noticed
        if found is not None:
            assert "load 8.0 on 4" in found.what and "OMP_WAIT_POLICY=PASSIVE" in found.remedy


@pytest.mark.parametrize(
    ("there", "rank", "warnings"),
    [(1, None, 1), (64, None, 0), (1, "1", 0)],  # another rank leaves it to the first
)
def test_a_pipelines_log_warns_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    there: int,
    rank: str | None,
    warnings: int,
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: there)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    warn_of_threads.cache_clear()
    with caplog.at_level(logging.WARNING, "spectrain_ext"):
        for _ in range(2):
            st.Pipeline([nn.Linear(2, 2)], st.optim.AdamW, nn.functional.mse_loss, "sync").release()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings
    words = "torch computes with 2 threads on 1 core. Remedy: OMP_NUM_THREADS=1"
    assert all(words in text for text in said)
    warn_of_threads.cache_clear()
