"""Tests averaged replicas over processes: the in-process bits, also after resuming."""

from __future__ import annotations

import pytest
import torch
from helpers.rank_cases import same
from helpers.ranks import run_ranks
from helpers.replica_programs import RUNS, data, make, row, sgd, stage_and_replica, stages, steps
from helpers.side_by_side import SideBySide
from helpers.ways import travelling
from torch import nn

import spectrain_ext as st
from studies.sparse import Sparse

pytestmark = pytest.mark.processes

ELASTIC, SPARSE = st.averaging.Elastic(0.3), Sparse(0.25, 2, 0.6)
CASES = {
    2: [([2], "vanilla", ELASTIC, {"microbatches": 4}), ([2], "sync", SPARSE, {"microbatches": 2})],
    3: [([3], "sync", ELASTIC, {"microbatches": 6}), ([3], "vanilla", SPARSE, {"microbatches": 3})],
    4: [
        ([2, 2], "spectrain", ELASTIC, {"microbatches": 4}),
        ([2, 2], "auto", SPARSE, {"microbatches": 4, "clip_norm": 0.05}),
        ([2, 2], "pipedream", ELASTIC, {"microbatches": 2}),
        ([2, 2], "gpipe", SPARSE, {"microbatches": 4, "window": None}),
    ],
}


def train(rank, ranks, way, path):
    """Return losses, own weights, the averages and an evaluation for each case, and a checkpoint's.

    For a checkpoint: the losses of a third run, and of another pipeline that loaded it; own weights
    after both; and the averages that a model and a pipeline without averaging loaded.
    """
    found = []
    for n, (counts, method, averaging, settings) in enumerate(CASES[ranks]):
        stage, where = stage_and_replica(counts, rank)[0], f"{path}/{n}"
        feeds = stage in (0, len(counts) - 1)

        def run(pipe, kind, feeds=feeds):
            return [r.loss.item() for r in pipe.run(data(*kind) if feeds else None)]

        more = {"scheduler": steps, "share_loss": True, **settings}
        with travelling(way):
            pipe, other = (
                make(rank, counts, method, averaging=averaging, **more) for _ in range(2)
            )
            plain = make(rank, counts, method, **more)
        losses = [run(pipe, kind) for kind in RUNS]
        own = row(pipe)
        with pipe.averaged():
            average = row(pipe)
        value = pipe.evaluate(data(3) if feeds else None)["loss"]
        assert torch.equal(row(pipe), own)
        st.checkpoint.save(where, pipe, minibatches=10)
        third = run(pipe, (4, 12, 12))
        run(other, (2, 12, 12))  # overwritten by the checkpoint
        st.checkpoint.load(where, other)
        again = run(other, (4, 12, 12))
        ends = [row(pipe), row(other)]
        st.checkpoint.load(where, plain)
        st.checkpoint.load(where, other, only_model=True)
        model = nn.Sequential(*stages(len(counts)))
        st.checkpoint.load(where, model)
        loaded = [row(plain), row(other), row(model[stage])]
        found.append((losses, own, average, value, [third, again], ends, loaded))
    return found


@pytest.mark.parametrize(
    ("ranks", "way"), [(2, "direct"), (3, "direct"), (4, "direct"), (2, "apart")]
)
def test_over_processes_the_bits_are_those_of_one(ranks, way, tmp_path):
    torch.set_num_threads(1)
    found = run_ranks(train, ranks, way, str(tmp_path))
    for (counts, method, averaging, settings), *mine in zip(CASES[ranks], *found, strict=True):
        r, n = counts[0], len(counts)
        kept = {**settings, "microbatches": settings["microbatches"] // r, "scheduler": steps}
        torch.manual_seed(0)
        mse = nn.functional.mse_loss
        kept["clip_scope"] = "stage"  # as in distributed training

        def make_one(passes, n=n, method=method, kept=kept, mse=mse):
            return st.Pipeline(stages(n), sgd, mse, method, passes=passes, **kept)

        side = SideBySide(make_one, r, averaging)
        pipes = side.pipes
        losses = [[[e.loss.item() for e in each] for each in side.run(data(*k))] for k in RUNS]
        owns = [[row(stage) for stage in pipe.children()] for pipe in pipes]
        with side.averaged():
            averages = [row(stage) for stage in pipes[0].children()]
        value = side.evaluate(data(3))["loss"]
        third = [[e.loss.item() for e in each] for each in side.run(data(4, 12, 12))]
        ends = [[row(stage) for stage in pipe.children()] for pipe in pipes]
        for rank, (lost, own, average, tested, *more) in enumerate(mine):
            where = f"{counts} {method} {averaging} rank {rank}"
            k, c = stage_and_replica(counts, rank)
            same(lost, [[each[c] for each in run] for run in losses], where)
            same([own, average], [owns[c][k], averages[k]], where)
            assert tested == pytest.approx(value, rel=1e-12), where
            resumed = [[each[c] for each in third]] * 2
            same(more, [resumed, [ends[c][k]] * 2, [averages[k]] * 3], where)
