"""Tests traces of distributed pipelines: overlap follows from the issue order."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import rank_pipelines
from helpers.pipeline_cases import batches, float64, mse, sgd, tanh_stages  # noqa: F401  # a fixture
from helpers.ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

import spectrain_ext as st
from spectrain_ext.timelines.merging import main, merge_traces
from spectrain_ext.timelines.method_timeline import simulate_method
from spectrain_ext.timelines.timeline import write_trace

COUNT = 6


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return folder, run_ranks(rank_pipelines.traced, 2, str(folder))


@pytest.mark.processes
@pytest.mark.parametrize("method", ["pipedream-vertical-sync", "spectrain"])
def test_a_rank_knows_the_versions_that_it_met(method):
    found = run_ranks(rank_pipelines.versions_met, 3, method)
    for k, turns in enumerate(found):
        expected = [
            (*span[:2], str(span.kind), *span[3:5], *span[7:])
            for span in simulate_method(method, 3, COUNT)
            if span.stage == k and span.version is not None
        ]
        assert turns == expected


def test_messages_travel_while_both_ranks_compute(traced):
    # The run finished although rank 1's first forward waited for the second message: the message
    # arrived during that computation, and rank 0 had computed it after sending the first.
    _, (first, second) = traced
    for names in (first, second):
        for i in range(COUNT):
            assert names.index(f"F{i}") < names.index(f"B{i}")
        assert names.count("update") == COUNT
    assert first.count("send") == second.count("send") == COUNT
    assert second.count("recv") == COUNT + 1  # the last one ends the run
    assert second.count("loss") == COUNT
    assert "predict" in first
    # two in flight: rank 0 computes the next forward before it requests a gradient
    begun = [name for name in first[: first.index("F2")] if name != "predict"]
    gradient = ["recv", "B0", "update"]
    assert begun == ["recv", "F0", "send", "recv", "F1", "send", *gradient, "recv"]


def test_the_traces_of_all_ranks_as_one(traced, tmp_path):
    folder, _ = traced
    out = tmp_path / "all.json"
    parts = [str(folder / f"{rank}.json") for rank in range(2)]
    assert main([str(out), *parts]) == 0
    document = json.loads(out.read_text())
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    assert min(event["ts"] for event in events) == 0.0
    # on one time axis: each send precedes the computation with its message
    at = {(event["pid"], event["name"]): event for event in events}
    for i in range(COUNT):
        sent, used = at[0, f"send activation {i}.0"], at[1, f"forward {i}.0"]
        assert sent["ts"] < used["ts"] + used["dur"]
    named = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert named == ["rank 0: stage 0", "rank 1: stage 1"]


def test_profiles_of_all_ranks_as_one(traced, tmp_path):
    folder, ranges = traced
    out = tmp_path / "all.json"
    merge_traces(out, [folder / f"{rank}.profile.json" for rank in range(2)])
    names = [event.get("name") for event in json.loads(out.read_text())["traceEvents"]]
    assert names.count("F5") == 2
    assert names.count("send") == sum(found.count("send") for found in ranges)


def test_files_that_cannot_be_merged(traced, tmp_path):
    folder, _ = traced
    whole = folder / "0.json"
    write_trace(tmp_path / "no-origin.json", [])
    with pytest.raises(ValueError, match=r"no-origin\.json: does not say when it began"):
        merge_traces(tmp_path / "x", [whole, tmp_path / "no-origin.json"])
    (tmp_path / "text").write_text("no")
    with pytest.raises(ValueError, match="text: expected a trace in JSON"):
        merge_traces(tmp_path / "x", [tmp_path / "text"])
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ValueError, match="list: expected a trace with traceEvents"):
        merge_traces(tmp_path / "x", [tmp_path / "list"])
    assert not (tmp_path / "x").exists()
    assert main([]) == 2


def test_replicas_of_a_stage_keep_apart(traced, tmp_path):
    folder, _ = traced
    merge_traces(tmp_path / "x", [folder / "0.json", folder / "0.json"])
    events = json.loads((tmp_path / "x").read_text())["traceEvents"]
    assert len({event["pid"] for event in events if event["ph"] == "X"}) == 2


def test_ranges_cost_nothing_where_nobody_looks(monkeypatch):
    made = []
    real = torch.autograd.profiler.record_function
    monkeypatch.setattr(
        "spectrain_ext.pipeline.observer.profiler.record_function",
        lambda name: made.append(name) or real(name),
    )
    pipe = st.Pipeline(tanh_stages(2), optimizer=sgd(), loss_fn=mse, method="spectrain")
    list(pipe.run(batches(2, size=6)))
    assert made == []
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        list(pipe.run(batches(2, size=6)))
    assert {"F0", "F1", "B0", "B1", "send", "recv", "predict"} <= set(made)
    assert set(made) <= {event.name for event in seen.events()}
    made.clear()
    list(pipe.run(batches(1, size=6), trace=st.Trace()))
    assert "F0" in made
