"""Tests traces of pipelines over ranks: overlap follows from the issue order."""

from __future__ import annotations

import json
import re
from itertools import count

import pytest
import torch
from helpers.rank_cases import Case
from helpers.ranks import run_ranks
from torch.distributed.distributed_c10d import _get_default_store
from torch.profiler import ProfilerActivity, profile

import spectrain_ext as st
from spectrain_ext.tools.timelines import write_trace

COUNT = 6
RANGE = re.compile(r"[FBW]\d+|predict|send|recv|loss|update")


def trace(rank, ranks, folder):
    """Trace a run whose stages compute at once; return the names of its ranges.

    Rank 1's first forward ends after rank 0's second one.
    """
    case, store, calls = Case("spectrain", (ranks, 1)), _get_default_store(), count()
    pipe = case.pipeline(rank, microbatches=1)
    (stage,) = pipe.children()

    def computed(*_):
        n = next(calls)
        if rank == 0:
            store.set(f"computed {n}", "")
        elif n == 0:
            store.wait(["computed 1"])

    stage.register_forward_hook(computed)
    seen = st.Trace()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        list(pipe.run(case.batches([8] * COUNT), trace=seen))
    write_trace(f"{folder}/{rank}.json", seen.spans(), microseconds=1e6, origin=seen.origin)
    profiled.export_chrome_trace(f"{folder}/{rank}.profile.json")
    ranges = [event for event in profiled.events() if RANGE.fullmatch(event.name)]
    return [event.name for event in sorted(ranges, key=lambda event: event.time_range.start)]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return folder, run_ranks(trace, 2, str(folder))


@pytest.mark.processes
def test_messages_travel_while_both_ranks_compute(traced):
    _, (first, second) = traced
    for names in (first, second):
        for i in range(COUNT):
            assert names.index(f"F{i}") < names.index(f"B{i}")
        assert names.count("update") == COUNT
    assert first.count("send") == second.count("send") == COUNT
    assert second.count("recv") == COUNT + 1  # the last one ends the run
    assert second.count("loss") == COUNT
    assert "predict" in first
    assert first.index("F1") < first.index("B0") < first.index("F2")  # two in flight


@pytest.mark.processes
def test_the_traces_of_all_ranks_on_one_time_axis(traced):
    """Each send precedes the computation with its message."""
    folder, ranges = traced
    at = {}
    for rank in range(2):
        document = json.loads((folder / f"{rank}.json").read_text())
        for event in document["traceEvents"]:
            if event["ph"] == "X":
                start = event["ts"] + document["baseTimeNanoseconds"] / 1000
                at[rank, event["name"]] = start, start + event["dur"]
        profiled = json.loads((folder / f"{rank}.profile.json").read_text())
        assert profiled["baseTimeNanoseconds"] > 0
        names = [event.get("name") for event in profiled["traceEvents"]]
        assert (names.count("F5"), names.count("send")) == (1, ranges[rank].count("send"))
    for i in range(COUNT):
        assert at[0, f"send activation {i}.0"][0] < at[1, f"forward {i}.0"][1]


def test_ranges_cost_nothing_where_nobody_looks(monkeypatch):
    made, profiler = [], torch.autograd.profiler
    real, pipe = profiler.record_function, Case("spectrain").pipeline()
    monkeypatch.setattr(profiler, "record_function", lambda name: made.append(name) or real(name))
    data = Case("spectrain").batches([6] * 2)
    list(pipe.run(data))
    assert made == []
    list(pipe.run(data, trace=st.Trace()))
    assert {"F0", "F1", "B0", "B1", "send", "recv", "predict"} <= set(made)
