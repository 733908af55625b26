"""Tests averaged replicas over processes: the in-process bits, also after resuming."""

from __future__ import annotations

import pytest
import torch
from helpers import rank_programs, replica_programs
from helpers.ranks import run_ranks
from helpers.replica_programs import RUNS, data, mse, row, sgd, stage_and_replica, stages, steps
from helpers.side_by_side import SideBySide

import spectrain_ext as st

pytestmark = pytest.mark.processes

ELASTIC, SPARSE = st.averaging.Elastic(0.3), st.averaging.Sparse(0.25, 2, 0.6)
CASES = {
    2: [
        ([2], "vanilla", ELASTIC, {"microbatches": 4}),
        ([2], "sync", SPARSE, {"microbatches": 2}),
    ],
    3: [([3], "sync", ELASTIC, {"microbatches": 6}), ([3], "vanilla", SPARSE, {"microbatches": 3})],
    4: [
        ([2, 2], "spectrain", ELASTIC, {"microbatches": 4}),
        ([2, 2], "auto", SPARSE, {"microbatches": 4, "clip_norm": 0.05}),
        ([2, 2], "pipedream", ELASTIC, {"microbatches": 2}),
        ([2, 2], "gpipe", SPARSE, {"microbatches": 4, "window": None}),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_over_processes_the_bits_are_those_of_one(ranks, tmp_path):
    check(ranks, None, tmp_path)


def test_the_same_whatever_way_bodies_go(tmp_path):
    check(2, "apart", tmp_path)


def check(ranks, way, path):
    torch.set_num_threads(1)
    program = (replica_programs.averaged, CASES[ranks], str(path))
    found = run_ranks(rank_programs.travels, ranks, way, *program)
    for number, (counts, method, averaging, settings) in enumerate(CASES[ranks]):
        mine = [rank[number] for rank in found]
        r, n = counts[0], len(counts)
        kept = {**settings, "microbatches": settings["microbatches"] // r}
        torch.manual_seed(0)
        pipes = [
            st.Pipeline(stages(n), sgd, mse, method, scheduler=steps, **kept) for _ in range(r)
        ]
        side = SideBySide(pipes, averaging)
        losses = [[[e.loss.item() for e in each] for each in side.run(data(*k))] for k in RUNS]
        owns = [[row(stage) for stage in pipe.children()] for pipe in pipes]
        with side.averaged():
            averages = [row(stage) for stage in pipes[0].children()]
        value = side.evaluate(data(3))["loss"]
        third = [[e.loss.item() for e in each] for each in side.run(data(4, 12, 12))]
        ends = [[row(stage) for stage in pipe.children()] for pipe in pipes]
        for rank, (lost, own, average, tested, goes_on, on, loaded) in enumerate(mine):
            where = f"{counts} {method} {averaging} rank {rank}"
            k, c = stage_and_replica(counts, rank)
            assert lost == [[each[c] for each in run] for run in losses], where
            assert torch.equal(own, owns[c][k]), where
            assert torch.equal(average, averages[k]), where
            assert tested == pytest.approx(value, rel=1e-12), where
            assert list(goes_on) == [[each[c] for each in third]] * 2, where
            assert all(torch.equal(end, ends[c][k]) for end in on), where
            assert all(torch.equal(one, averages[k]) for one in loaded), where


def test_what_cannot_be():
    for reasons in run_ranks(replica_programs.bad_averaging, 2):
        assert len(reasons) == 4
        for reason, expected in zip(
            reasons,
            (
                r"ValueError: averaging: needs the same number of replicas.* got [1, 1]",
                r"ValueError: averaging: needs the same number of replicas.* got [1, 1]",
                r"ValueError: averaging: clip_scope='global'",
                r"ValueError: averaging: ",
            ),
            strict=True,
        ):
            head, _, tail = expected.partition(".*")
            assert reason.startswith(head), reason
            assert tail in reason


def test_a_replica_that_fails_ends_the_others_with_its_reason():
    waiting, failed = run_ranks(replica_programs.failing_replica, 2)
    assert failed.startswith("StageError: stage 0, minibatch 2, loss: ArithmeticError: odd")
    assert waiting.startswith("RankError: rank 0, average weights over replicas of minibatch 2")
    assert "first cause: rank 1, loss of minibatch 2" in waiting
    assert "stage 0, minibatch 2, loss: ArithmeticError: odd; " in waiting
    assert "; report of all ranks: " in waiting
