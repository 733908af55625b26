"""Tests evaluations and whole trainings over processes against the in-process results."""

from __future__ import annotations

import pytest
import torch
from helpers import loop_programs, rank_programs
from helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

CASES = {
    2: [
        ([1, 1], "spectrain", 2, {}),
        ([1, 1], "gpipe", 4, {"share_loss": True}),
    ],
    3: [
        ([1, 1, 1], "auto", 2, {}),
        ([1, 2], "sync", 2, {}),
        ([2, 1], "sync", 2, {"share_loss": True}),
    ],
    5: [([2, 3], "vanilla", 6, {}), ([1, 3, 1], "vanilla", 3, {})],
}


@pytest.mark.parametrize("ranks", CASES)
def test_all_ranks_get_the_floats_of_one_process(ranks):
    check(ranks, run_ranks(loop_programs.apart, ranks, CASES[ranks]))


@pytest.mark.parametrize("way", ["staged", "apart"])
def test_the_way_of_bodies_does_not_change_the_floats(way):
    check(3, run_ranks(rank_programs.travels, 3, way, loop_programs.apart, CASES[3]))


def check(ranks, found):
    torch.set_num_threads(1)
    for number, (counts, method, parts, _) in enumerate(CASES[ranks]):
        where = f"{counts} {method}"
        expected = loop_programs.together(len(counts), method, parts)
        plain = loop_programs.together(len(counts), method, parts, evaluates=False)
        for rank, results in enumerate(found):
            measured, kept, means, output, state, drawn = results[number]
            k, _ = loop_programs.stage_and_replica(counts, rank)
            last = k == len(counts) - 1
            assert measured[:2] == expected[0][:2], where
            assert means == found[0][number][2], where
            assert [len(means), len(measured)] == [2, 6]
            assert measured == found[0][number][0], where
            assert torch.equal(drawn, plain[5]), where
            assert (output is not None) == last, where
            assert [one is not None for one in kept] == [last] * 5, where
            if max(counts) == 1:  # replicas have separate batch statistics
                assert measured == expected[0], where
                assert means == expected[2] == plain[2], where
                for name, tensor in state.items():
                    assert torch.equal(tensor, plain[4][name]), f"{where} {name}"
                if last:
                    assert torch.equal(output, expected[3]), where
                    assert kept == expected[1], where
        firsts = [
            rank for rank in range(ranks) if not loop_programs.stage_and_replica(counts, rank)[1]
        ]
        states = [found[rank][number][4] for rank in firsts]
        assert loop_programs.loaded(len(counts), states) == found[0][number][0][-2:], where
        assert torch.equal(expected[5], plain[5])


EPOCHS = {
    2: [
        ([1, 1], "spectrain", {}),
        ([1, 1], "gpipe", {"microbatches": 2}),
        ([1, 1, 1, 1], "vanilla", {}),
        ([2], "sync", {"microbatches": 2}),
    ],
    3: [
        ([1, 1, 1], "pipedream+vanilla@6", {}),
        ([1, 1, 1], "vanilla", {}),
        ([1, 2], "sync", {"microbatches": 2}),
        ([2, 1], "sync", {"microbatches": 2}),
    ],
}


@pytest.mark.parametrize("ranks", EPOCHS)
def test_one_loader_feeds_all_ranks_over_epochs(ranks):
    torch.set_num_threads(1)
    found = run_ranks(loop_programs.epochs_apart, ranks, EPOCHS[ranks])
    for number, (counts, method, more) in enumerate(EPOCHS[ranks]):
        assert all(of_rank[number][0] == found[0][number][0] for of_rank in found)
        if max(counts) == 1:  # replicas add in another order
            expected, state = loop_programs.epochs_together(
                len(counts), method, more.get("microbatches", "auto")
            )
            assert found[0][number][0] == expected, (counts, method)
            for of_rank in found:
                for name, tensor in of_rank[number][1].items():
                    assert torch.equal(tensor, state[name]), (counts, method, name)


def test_stages_evaluate_at_the_same_time():
    found, died = zip(*run_ranks(loop_programs.slow, 3), strict=True)
    assert all(died)
    assert [len(times) for times in found] == [12] * 3
    at_once = [
        sum(begin < other_end and other_begin < end for other_begin, other_end in other)
        for other in found[1:]
        for begin, end in found[0]
    ]
    assert sum(overlaps > 0 for overlaps in at_once) > len(at_once) / 2


@pytest.mark.parametrize(
    ("what", "where"), [("metric", 2), ("stage", 1), ("batch", 0), ("computed", 2)]
)
def test_one_rank_fails_and_all_end(what, where):
    found = run_ranks(loop_programs.failing, 3, what, where)
    for rank, (name, text, modes) in enumerate(found):
        assert "broken here" in text
        assert modes == {True}
        if what == "computed":
            assert ("metrics['mine']" in text) or rank != where or name == "ValueError"
        elif rank != where:
            assert (name, f"first cause: rank {where}, " in text) == ("RankError", True)


def test_what_is_refused_leaves_the_pipeline_as_it_was():
    for rank, (found, measured) in enumerate(run_ranks(loop_programs.refused, 2)):
        inside, called, fitted, empty, callback = found
        assert inside.startswith("RuntimeError: evaluate: a run of this pipeline has not ended")
        assert called.startswith("RuntimeError: calling the pipeline: a run")
        assert fitted.startswith("RuntimeError: run: a run")
        assert empty == "ValueError: batches: expected at least one to evaluate, got none"
        assert (
            callback
            == ("ValueError: enough", "RuntimeError: process 1: ValueError: enough")[rank == 0]
        )
        assert measured["loss"] > 0


def test_a_loader_of_a_part_of_the_samples_is_refused():
    said = (
        "batches: a DistributedSampler with num_replicas=2 gives this process a part of the "
        "samples, and nobody would take the rest, as rank 0 has the only loader of a pipeline, and "
        "deals microbatches out to replicas; give it num_replicas=1 and rank=0"
    )
    first, last = run_ranks(loop_programs.sharded, 2)
    assert first == [*[said] * 3, 6, *[said] * 3, 6]
    assert last == [6, 6]
