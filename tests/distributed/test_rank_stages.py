"""Tests several stages per rank against the in-process bits, and that all ranks end together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import loop_programs, rank_pipelines, rank_programs
from helpers.failing_runs import expect_one_end, stages_trial
from helpers.ranks import Ranks, run_ranks

import spectrain_ext as st
from spectrain_ext.distributed.connections import RankConnections
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Replicas
from spectrain_ext.timelines import simulate_method

pytestmark = pytest.mark.processes

METHODS = [name for name in st.methods() if name != "xgrad"]  # a method for one stage
SOME = ["sync", "1f1b", "gpipe", "pipedream", "vanilla", "auto", "interleaved", "wpipe"]
RUNS = [(11, 12, 5), (3,), (0,), (6, 12, 1)]


@pytest.mark.parametrize(
    ("ranks", "chunks", "methods", "places"),
    [
        pytest.param(2, 2, METHODS, (), marks=pytest.mark.nightly),
        (2, 2, ["spectrain-stash", "pipedream-2bw", "zb-h1-async"], ()),
        (3, 2, [*SOME, "interleaved-async"], ()),
        (2, 3, ["gpipe", "spectrain"], ()),
        (3, 2, ["gpipe", "wpipe", "spectrain"], (0, 3, 4)),  # tied on one rank and between two
        (2, 2, ["auto", "1f1b"], (1, 3)),
    ],
)
def test_the_same_bits_as_in_one_process(ranks, chunks, methods, places):
    torch.set_num_threads(1)
    found = run_ranks(rank_pipelines.apart, ranks, methods, RUNS, None, places, chunks)
    check(found, ranks, chunks, methods, places)


@pytest.mark.parametrize("way", ["staged", "apart"])
def test_the_way_of_bodies_does_not_change_the_bits(way):
    methods = ["vanilla", "interleaved"]
    torch.set_num_threads(1)
    given = (rank_pipelines.apart, methods, RUNS, None, (), 2)
    check(run_ranks(rank_programs.travels, 2, way, *given), 2, 2, methods, ())


def check(found, ranks, chunks, methods, places):
    for method in methods:
        losses, states, trained = rank_pipelines.together(
            method, chunks * ranks, RUNS, None, places
        )
        of_method = [rank[method] for rank in found]
        assert of_method[-1][0] == losses, method
        if method == "vanilla":  # it shares them
            for shared, *_ in of_method[:-1]:
                same(shared, [[loss.double() for loss in run] for run in losses], method)
        for rank, (_, own, optimizers) in enumerate(of_method):
            same(own, states[rank::ranks], f"{method}, rank {rank}")
            same(optimizers, trained[rank::ranks], f"{method}, rank {rank}")


def same(found, expected, where):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            same(found[key], value, f"{where}: {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for n, value in enumerate(expected):
            same(found[n], value, f"{where}: {n}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("method", ["spectrain", "interleaved"])
def test_evaluations_and_whole_trainings(method):
    torch.set_num_threads(1)
    expected = loop_programs.together(6, method, 3)
    found = run_ranks(loop_programs.in_chunks, 3, 2, method, 3)
    states = {}
    for rank, (measured, kept, means, output, state, drawn) in enumerate(found):
        assert measured == expected[0]
        assert means == expected[2]
        assert torch.equal(drawn, expected[5])
        assert kept == (expected[1] if rank == 2 else [None] * 5)
        assert (output is not None) == (rank == 2)
        states.update(state)
    assert torch.equal(found[2][3], expected[3])
    assert states.keys() == expected[4].keys()
    same(states, dict(expected[4]), method)


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_rank_0_decides_when_the_run_ends(leaves):
    made = run_ranks(rank_pipelines.leaving, 3, leaves, 5, "vanilla", 2)
    ((first, second),) = {tuple(steps) for _, steps in made}  # all stages made the same updates
    assert second == first + 4
    assert first == (30 if leaves else rank_pipelines.left_together(6, 5))
    assert [seen for seen, _ in made] == [6 if rank == leaves else first for rank in range(3)]


@pytest.mark.parametrize("method", ["interleaved-async", "pipedream-vertical-sync"])
def test_a_rank_knows_the_versions_that_it_met(method):
    expected = [
        (*span[:2], str(span.kind), *span[3:5], *span[7:])
        for span in simulate_method(method, 6, 6)
        if span.version is not None
    ]
    for rank, turns in enumerate(run_ranks(rank_pipelines.versions_met, 3, method, 2)):
        for k in (rank, rank + 3):
            own = [turn for turn in turns if turn[0] == k]
            assert own == [turn for turn in expected if turn[0] == k]


def test_shapes_that_grow_are_allowed_on_request():
    assert run_ranks(rank_pipelines.growing, 2, True, 2)[1] == [2, 5, 3, 9]
    first, last = Ranks(rank_pipelines.growing, 2, False, 2).join()
    assert (first.code, last.code) == (1, 1)
    assert "edge 0 -> 3 of targets was opened for" in last.error


def test_what_is_refused():
    first, second = run_ranks(rank_pipelines.refusing, 2)
    assert first["replicas"] == (
        "replicas: with 2 stages on every rank expected one of each, got 2"
    )
    assert "stage: rank 0 has '2 stages' and rank 1 has '1 stages'" in first["numbers"]
    assert "stage: rank 1 has '1 stages' and rank 0 has '2 stages'" in second["numbers"]
    assert "expected at least one module" in first["none"]
    assert "the very same module" in first["again"]
    assert "[[2, 2], 'float32', True]" in first["tied"]
    (alone,) = run_ranks(rank_pipelines.refusing, 1)
    assert alone["again"].startswith("stage: got 2 for the only rank")


@pytest.mark.parametrize(
    ("method", "order", "what"),
    [
        ("auto", (0, 1), ""),
        ("auto", (1, 0), "stages[0]: it is stage 1 of the 2"),
        ("interleaved", (0, 1, 2, 3), ""),
        ("interleaved", (0, 1, 3, 2), "stages[2]: it is stage 3 of the 4"),  # a V
    ],
)
def test_stages_of_a_cut_have_an_order_over_ranks(method, order, what):
    for found in run_ranks(rank_pipelines.of_a_cut, 2, method, order):
        assert found.startswith(what) and bool(found) == bool(what)


def test_the_stages_of_a_rank_are_on_one_device():
    replicas = Replicas((1,) * 4, 2)
    around = RankConnections(
        *(None, SimpleNamespace(rank=0), replicas, False, False),
        clip_norm=None,
        clip_scope="stage",
    )
    stages = [SimpleNamespace(device=torch.device("cuda", n)) for n in range(2)]
    with pytest.raises(ValueError, match=r"stage: .* one device, got cuda:0, cuda:1"):
        around.connect(stages, [], find_method("auto"), None, ())


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n < 4 else pytest.mark.nightly) for n in range(100)],
)
def test_one_end_for_all(seed):
    count, what = stages_trial(seed)
    expect_one_end(Ranks(rank_pipelines.failing, count, what, keeper=what["keeper"]), what)
