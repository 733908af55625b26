"""Tests tied weights over processes against the in-process bits."""

from __future__ import annotations

import pytest
import torch
from helpers import rank_pipelines, rank_programs
from helpers.ranks import Ranks, run_ranks

import spectrain_ext as st

pytestmark = pytest.mark.processes

METHODS = [name for name in st.methods() if name != "xgrad"]  # a method for one stage
RUNS = [(9, 8, 5), (0,), (5, 8, 1)]


@pytest.mark.parametrize(
    ("n", "places", "methods"),
    [
        pytest.param(2, (0, 1), METHODS, marks=pytest.mark.nightly),
        (2, (0, 1), ["auto", "gpipe", "pipedream-2bw", "second-order"]),
        (3, (0, 2), ["auto", "gpipe", "pipedream", "spectrain", "lwp-w"]),
        (4, (0, 1, 3), ["auto", "1f1b", "vanilla", "spectrain"]),
    ],
)
def test_the_same_bits_as_in_one_process(n, places, methods):
    torch.set_num_threads(1)
    found = run_ranks(rank_pipelines.apart, n, methods, RUNS, None, places)
    for method in methods:
        losses, states, optimizers = rank_pipelines.together(method, n, RUNS, None, places)
        of_method = [rank[method] for rank in found]
        assert of_method[-1][0] == losses, method
        for rank, (_, state, optimizer) in enumerate(of_method):
            same(state, states[rank], f"{method}, rank {rank}")
            own = optimizers[rank]["state"]
            assert optimizer["state"].keys() == own.keys(), (method, rank)
            for index, entry in own.items():
                same(optimizer["state"][index], entry, f"{method}, rank {rank}, {index}")
        first, *others = (of_method[k][1]["linear.weight"] for k in places)
        assert all(torch.equal(first, other) for other in others), method


def same(found, expected, where):
    assert found.keys() == expected.keys(), where
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), f"{where}: {key}"


@pytest.mark.parametrize("way", ["staged", "apart"])
def test_the_way_of_bodies_does_not_change_the_bits(way):
    methods = ["vanilla", "gpipe"]
    torch.set_num_threads(1)
    program = rank_pipelines.apart
    found = run_ranks(rank_programs.travels, 3, way, program, methods, RUNS, None, (0, 2))
    for method in methods:
        losses, states, _ = rank_pipelines.together(method, 3, RUNS, None, (0, 2))
        assert found[-1][method][0] == losses, method
        for rank in range(3):
            same(found[rank][method][1], states[rank], f"{method}, rank {rank}")


def test_copies_are_true_after_every_run():
    found = run_ranks(rank_pipelines.tied_in_steps, 3)
    for home, other, copy in zip(*found, strict=True):
        assert torch.equal(home, copy)
        assert not torch.equal(home, other)
    left, none, again = found[0]
    assert torch.equal(left, none)
    assert not torch.equal(left, again)


def test_evaluations_are_those_of_one_process():
    torch.set_num_threads(1)
    found = run_ranks(rank_pipelines.tied_and_evaluated, 3)
    expected = rank_pipelines.tied_and_evaluated(0, 1)
    assert len(set(expected[0])) == 5  # evaluations move a running mean
    for measured, _, _ in found:
        assert measured == expected[0]
    assert torch.equal(found[2][1], expected[1])
    assert torch.equal(found[2][2], expected[2])


def test_replicas_of_other_stages():
    torch.set_num_threads(1)
    found = run_ranks(rank_pipelines.tied_between_replicas, 4, [1, 2, 1])
    expected = run_ranks(rank_pipelines.tied_between_replicas, 3, [1, 1, 1])
    for (losses, state), alone in zip(found, [0, 1, 1, 2], strict=True):
        assert losses == pytest.approx(expected[alone][0], rel=1e-6)
        for name, tensor in expected[alone][1].items():
            torch.testing.assert_close(state[name], tensor)
    assert torch.equal(found[0][1]["scale"], found[3][1]["scale"])


def test_ties_that_cannot_be():
    for found in run_ranks(rank_pipelines.tied_wrongly, 4):
        where = "stages[3]: parameter 'weight' is tied to"
        assert found["missing"] == f"{where} 'wait' of stages[0], which there is not"
        assert found["own"] == f"{where} 'bias' of stages[0], which there is not"
        assert "[[6, 6], 'float32', True] here and [[6], 'float32', True] there" in found["shape"]
        assert "tie_word_embeddings=False" in found["replicas"]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_fails_ends_all(culprit):
    ends = Ranks(rank_pipelines.tied_and_failing, 3, culprit).join(deadline=40.0)
    for rank, end in enumerate(ends):
        assert end.code == 1, end.error
        assert "planned" in end.error
        assert rank == culprit or f"first cause: rank {culprit}" in end.error
