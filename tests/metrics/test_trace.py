"""Tests traces of real runs: the instructions and versions of a simulation, with real times."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.pipeline_cases import batches, float64, mse, sgd, tanh_stages  # noqa: F401  # a fixture
from helpers.recorded_streams import recorded
from torch import nn

import spectrain_ext as st
from spectrain_ext.schedule import COMPUTE, Kind
from spectrain_ext.tools.simulation import summarize
from spectrain_ext.tools.timelines import draw_timeline, simulate_method, write_trace

SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)


def traced(method, n, count, **more):
    pipe = st.Pipeline(tanh_stages(n), optimizer=sgd(), loss_fn=mse, method=method, **more)
    trace = st.Trace()
    results = list(pipe.run(batches(count, size=6), trace=trace))
    assert len(results) == count
    return trace.spans()


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("spectrain", {}),
        ("pipedream", {"window": "wide"}),
        ("pipedream-vertical-sync", {}),
        ("pipedream-2bw", {"microbatches": 3}),
        ("spectrain-local", {"microbatches": 2}),
        ("gpipe", {"microbatches": 3}),
        ("xpipe", {"microbatches": 2}),
        ("zb-h1", {"microbatches": 4}),
        ("zb-h1-async", {"microbatches": 2}),
    ],
)
def test_a_run_is_what_the_simulation_says(method, more):
    real = traced(method, 3, 7, **more)
    simulated = list(simulate_method(method, 3, 7, **more))

    def of(spans, stage):
        return [(*s[1:5], s[7], s[8]) for s in spans if s.stage == stage and s.kind in COMPUTE]

    for stage in range(3):
        assert of(real, stage) == of(simulated, stage)


def test_times_are_in_order():
    spans = traced("spectrain", 3, 6)
    assert min(s.start for s in spans) == 0.0
    ends = {}
    for s in spans:
        assert s.end >= s.start >= ends.get((s.stage, s.lane), 0.0)
        ends[s.stage, s.lane] = s.end
    sent = {(s.stage, s.minibatch): s.end for s in spans if s.kind is Kind.SEND_ACTIVATION}
    for s in spans:
        if s.kind is Kind.FORWARD and s.stage:
            assert s.start >= sent[s.stage - 1, s.minibatch]
    kinds = {s.kind for s in spans}
    loads = {Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD}
    assert kinds == {*loads, Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.LOSS, *SENDS}
    assert 0.0 < sum(summarize(spans).busy) <= 1.0 + 1e-9  # one thread runs all of them


def test_a_trace_holds_the_last_run():
    pipe, trace = st.Pipeline(tanh_stages(2), sgd(), mse, "vanilla"), st.Trace()
    for count in (5, 2):
        list(pipe.run(batches(count), trace=trace))
    assert {s.minibatch for s in trace.spans()} == {0, 1}
    assert st.Trace().spans() == []


def test_a_run_that_fails_leaves_what_ended_before():
    pipe = st.Pipeline([nn.Identity(), *tanh_stages(1)], sgd(), mse, "vanilla")
    trace, bad = st.Trace(), (torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(st.StageError):
        list(pipe.run([*batches(2), bad, *batches(3)], trace=trace))
    forwards = [s.minibatch for s in trace.spans() if (s.stage, s.kind) == (1, Kind.FORWARD)]
    assert forwards == [0, 1]


def test_a_run_can_be_drawn(tmp_path):
    spans = traced("spectrain", 2, 4)
    write_trace(tmp_path / "t.json", spans, microseconds=1e6)
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) > len(spans)
    pytest.importorskip("matplotlib")
    draw_timeline(tmp_path / "t.png", spans, versions=True, communication=True, unit="seconds")
    assert (tmp_path / "t.png").stat().st_size > 1000


@pytest.mark.parametrize(("method", "where"), [("vanilla", "compute"), ("pipedream", "prediction")])
def test_an_update_is_timed_where_it_runs(method, where, monkeypatch):
    monkeypatch.setattr("spectrain_ext.tools.metrics.trace._mark", lambda stream: stream.lane.name)
    with recorded(range(3)):
        stages = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)]
        pipe = st.Pipeline(stages, sgd(), mse, method)
        trace = st.Trace()
        list(pipe.run(batches(12), trace=trace))
    for k, kind, i, _, start, end in trace._parts[-1].records:
        if kind is Kind.UPDATE and 3 < i < 8:
            assert start == end == f"{where} stream of stage {k}"


@pytest.mark.cuda
def test_on_a_gpu_times_are_the_devices():
    torch.set_default_dtype(torch.float32)
    n, width = 2, 2048
    stages = [nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(n)]
    pipe = st.Pipeline(
        stages, optimizer=sgd(), loss_fn=mse, method="spectrain", devices=["cuda:0"] * n
    )
    trace = st.Trace()
    for _ in pipe.run(batches(4, size=512, width=width), trace=trace):
        pass
    spans = trace.spans()
    forwards = [s for s in spans if s.kind is Kind.FORWARD]
    assert len(forwards) == 4 * n
    assert all(0.0 < s.end - s.start < 10.0 for s in forwards)
    for stage in range(n):
        updates = [s.version for s in spans if (s.stage, s.kind) == (stage, Kind.UPDATE)]
        assert updates == [1, 2, 3, 4]
