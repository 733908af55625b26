"""Tests threads with less than a core each: by affinity, a quota, processes, or other work."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext import threads
from spectrain_ext.threads import cores, crowded, disturbed, warn_of_threads


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Replace what this process sees of its machine."""

    def of(*, there=4, threads_of_torch=4, load=0.0, quota=None, old_quota=None, ranks=None):
        monkeypatch.setattr(threads, "_CGROUP", tmp_path)
        if quota is not None:
            (tmp_path / "cpu.max").write_text(f"{quota}\n")
        if old_quota is not None:
            (tmp_path / "cpu").mkdir()
            for name, value in zip(("quota", "period"), old_quota, strict=True):
                (tmp_path / "cpu" / f"cpu.cfs_{name}_us").write_text(f"{value}\n")
        fake = SimpleNamespace(
            sched_getaffinity=lambda _: set(range(there)),
            getloadavg=lambda: (load, load, load),
            environ={} if ranks is None else {"LOCAL_WORLD_SIZE": str(ranks)},
        )
        monkeypatch.setattr(threads, "os", fake)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads_of_torch)

    return of


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(None, 4), ("max 100000", 4), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1)],
)
def test_a_containers_quota(machine, quota, expected):
    machine(quota=quota)
    assert cores() == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [((-1, 100000), 4), ((300000, 100000), 3), (("", 1), 4)]
)
def test_an_older_containers_quota(machine, quota, expected):
    machine(old_quota=quota)
    assert cores() == expected


def test_here():
    assert 1 <= cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("given", "what", "remedy"),
    [
        ({"threads_of_torch": 4}, None, None),
        ({"there": 2, "threads_of_torch": 8}, "8 threads on 2 cores", "set_num_threads(2)"),
        ({"quota": "100000 100000"}, "4 threads on 1 core.", "OMP_NUM_THREADS=1 "),
        ({"threads_of_torch": 2, "ranks": 2}, None, None),
        ({"threads_of_torch": 3, "ranks": 2}, "2 processes share 4 cores, and", "NUM_THREADS=2 "),
        ({"threads_of_torch": 1, "ranks": 8}, "8 processes share 4 cores.", "at most 4 of them"),
        ({"threads_of_torch": 2, "ranks": 8}, "2 threads in each", "OMP_NUM_THREADS=1 "),
        ({"threads_of_torch": 4, "ranks": "many"}, None, None),
    ],
)
def test_more_threads_than_cores(machine, given, what, remedy):
    machine(**given)
    found = crowded()
    assert (found is None) == (what is None)
    if found is not None:
        assert what in found.what
        assert remedy in found.remedy


def test_other_work(machine):
    machine(load=0.3)
    assert disturbed() is None
    machine(load=8.0, threads_of_torch=1)
    assert disturbed() is None
    machine(load=8.0)
    found = disturbed()
    assert found is not None
    assert "load 8.0 on 4" in found.what
    assert "OMP_WAIT_POLICY=PASSIVE" in found.remedy


def _pipeline():
    stages = [nn.Linear(2, 2)]
    pipe = st.Pipeline(stages, lambda p: st.optim.SGD(p, lr=0.1), nn.functional.mse_loss, "sync")
    pipe.release()


@pytest.mark.parametrize(("there", "warnings"), [(1, 1), (64, 0)])
def test_a_pipelines_log_warns_once(monkeypatch, caplog, there, warnings):
    monkeypatch.setattr(threads, "cores", lambda: there)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    warn_of_threads.cache_clear()
    with caplog.at_level(logging.WARNING, "spectrain_ext"):
        _pipeline()
        _pipeline()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings
    if said:
        assert "torch computes with 2 threads on 1 core. Remedy: OMP_NUM_THREADS=1" in said[0]
    warn_of_threads.cache_clear()


def test_other_ranks_of_a_machine_leave_it_to_the_first(monkeypatch, caplog):
    monkeypatch.setattr(threads, "cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    warn_of_threads.cache_clear()
    with caplog.at_level(logging.WARNING, "spectrain_ext"):
        _pipeline()
    assert not caplog.records
    warn_of_threads.cache_clear()
