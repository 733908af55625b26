"""Tests replicated stages over processes against in-process results."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import rank_programs, replica_programs
from helpers.ranks import Ranks, run_ranks
from helpers.replica_programs import RUNS, data, mse, sgd, stages, steps
from oracle.replicas import ReplicaOracle
from oracle.schedules import CHUNKED
from oracle.sgd import AveragingSGD

import spectrain_ext as st

pytestmark = pytest.mark.processes

ASYNCHRONOUS = ["vanilla", "pipedream", "spectrain", "spectrain-stash", "pipedream-2bw"]
SYNCHRONOUS = ["sync", "gpipe", "1f1b", "zb-h1"]
SOME = ["spectrain-local", "second-order", "xpipe", "lwp-w", "pipedream-vertical-sync"]
OTHERS = [
    name
    for name in st.methods()
    if name not in (*ASYNCHRONOUS, *SYNCHRONOUS, *SOME, "xgrad")  # a method for one stage
]


def cases(counts, microbatches, methods):
    return [(counts, method, {"microbatches": microbatches}) for method in methods]


CASES = {
    2: [
        *cases([2], 2, ["sync", "vanilla"]),
        *cases([2], 4, ["gpipe", "1f1b", "pipedream", "spectrain"]),
        ([2], "vanilla", {"microbatches": 4, "clip_norm": 0.02}),
        ([2], "spectrain", {"microbatches": 2, "recompute": True, "window": 3}),
        ([2], "pipedream", {"microbatches": 4, "recompute": 1, "window": 3}),  # every block
    ],
    3: [
        *cases([2, 1], 4, ["sync", "1f1b", "pipedream", "spectrain-stash", "pipedream-2bw"]),
        *cases([1, 2], 4, ["gpipe", "zb-h1", "vanilla"]),
        ([2, 1], "gpipe", {"microbatches": 4, "clip_norm": 0.05, "clip_scope": "global"}),
        ([1, 2], "1f1b", {"microbatches": 4, "clip_norm": 0.05, "clip_scope": "global"}),
        ([2, 1], "vanilla", {"microbatches": 4, "share_loss": True, "window": "wide"}),
        ([1, 2], "vanilla", {"microbatches": 2, "share_loss": True, "window": [5, 3]}),
        ([1, 2], "spectrain", {"microbatches": 2, "dynamic_shapes": True}),
        ([1, 2], "spectrain", {"microbatches": 4}),
    ],
    4: [
        *cases([2, 2], 4, [*SYNCHRONOUS, *ASYNCHRONOUS, *SOME]),
        *cases([1, 2, 1], 4, ["1f1b", "pipedream", "spectrain"]),
        *cases([1, 2, 1], 6, ["pipedream-2bw", "spectrain-stash"]),
        ([2, 2], "sync", {"microbatches": 4, "share_loss": True}),
        ([2, 2], "pipedream", {"microbatches": 4, "recompute": True}),
        ([2, 1, 1], "gpipe", {"microbatches": 4}),
        ([1, 2, 1], "vanilla", {"microbatches": 4, "share_loss": True}),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_methods_are_what_the_oracle_says(ranks):
    check(ranks, CASES[ranks])


@pytest.mark.parametrize("way", ["staged", "apart"])
def test_replicas_are_what_the_oracle_says_whatever_way_bodies_go(way):
    check(5, cases([2, 3], 6, ["vanilla", "1f1b", "spectrain"]), way)


@pytest.mark.nightly
@pytest.mark.parametrize("counts", [[2, 2], [2, 1, 1], [1, 3], [3, 1]], ids=str)
def test_all_methods_are_what_the_oracle_says(counts):
    alike = len(set(counts)) == 1
    unlike = () if alike else ("pipedream-vertical-sync", *CHUNKED)
    if counts[0] > 1:  # its replicas read different stale weights
        unlike = (*unlike, "dc-asgd", "gap-aware")
    every = [*SYNCHRONOUS, *ASYNCHRONOUS, *SOME, *OTHERS]
    check(4, cases(counts, 12, [name for name in every if name not in unlike]))


def check(ranks, chosen, way=None):
    torch.set_num_threads(1)
    found = run_ranks(rank_programs.travels, ranks, way, replica_programs.trained, chosen)
    for number, (counts, method, settings) in enumerate(chosen):
        where = f"{counts} {method} {settings}"
        mine = [rank[number] for rank in found]
        only_apart = ("share_loss", "dynamic_shapes")
        more = {k: v for k, v in settings.items() if k not in only_apart}
        optimizer = (
            of_torch(AveragingSGD, smoothed=True) if method == "spectrain-smoothed" else of_torch()
        )
        if isinstance(more.get("window"), int):
            more["window"] = [more["window"]] * len(counts)
        oracle = ReplicaOracle(stages(len(counts)), counts, optimizer, mse, method, steps, **more)
        expected = [[loss.item() for loss in oracle.run(data(*run))] for run in RUNS]
        for rank, (losses, state, momentum) in enumerate(mine):
            k, replica = replica_programs.stage_and_replica(counts, rank)
            if k == len(counts) - 1 or settings.get("share_loss"):
                assert losses == [pytest.approx(run, rel=1e-9, abs=1e-12) for run in expected], (
                    where
                )
            else:
                assert losses == [], where
            for name, tensor in oracle.stages[k].state_dict().items():
                torch.testing.assert_close(
                    state[f"{k}.{name}"], tensor, rtol=1e-9, atol=1e-12, msg=where
                )
            if replica:  # the bits of the first replica
                _, weights, buffers = mine[rank - replica]
                assert all(map(torch.equal, state.values(), weights.values())), where
                for p, buffer in buffers.items():
                    assert torch.equal(buffer["momentum_buffer"], momentum[p]["momentum_buffer"]), (
                        where
                    )
        if method in SYNCHRONOUS and "clip_norm" not in settings:
            together(counts, method, settings, expected, mine)


def together(counts, method, settings, losses, found):
    """Synchronous training does not depend on the assignment of work: one process, no replicas."""
    parts = stages(len(counts))
    pipe = st.Pipeline(
        parts, sgd, mse, method, scheduler=steps, microbatches=settings["microbatches"]
    )
    for run, expected in zip(RUNS, losses, strict=True):
        assert [r.loss.item() for r in pipe.run(data(*run))] == pytest.approx(expected, rel=1e-9)
    for rank, (_, state, _) in enumerate(found):
        k = replica_programs.stage_and_replica(counts, rank)[0]
        for name, tensor in parts[k].state_dict().items():
            torch.testing.assert_close(state[f"{k}.{name}"], tensor, rtol=1e-9, atol=1e-12)


def of_torch(kind=torch.optim.SGD, **more):
    return lambda params: kind(params, lr=0.03, momentum=0.9, weight_decay=0.01, **more)


def test_an_optimizer_whose_state_is_sharded_over_the_replicas():
    """ZeRO: each replica stores and updates a part, and the step exchanges the parts."""
    for whole, sharded, narrow, whole_narrow in run_ranks(replica_programs.sharded, 2):
        for mine, other in ((sharded, whole), (narrow, whole_narrow)):
            assert (mine[2], other[2]) == (2, 4)
            assert mine[0] == other[0]
            assert all(map(torch.equal, mine[1].values(), other[1].values()))


@pytest.mark.parametrize(("counts", "leaves"), [([2, 1], 0), ([2, 1], 1), ([1, 2], 2)])
def test_rank_0_decides_when_the_run_ends(counts, leaves):
    made = run_ranks(replica_programs.leaving, 3, counts, leaves, 4)
    updates = {tuple(count) for _, count, _ in made}
    assert len(updates) == 1, made  # all made the same, in both runs
    first, second = updates.pop()
    assert second == first + 3
    assert first < 20 if leaves == 0 else first == 20
    assert [seen for seen, _, _ in made] == [5 if rank == leaves else first for rank in range(3)]
    pair = [made[0], made[1]] if counts == [2, 1] else [made[1], made[2]]
    assert all(map(torch.equal, *(state.values() for _, _, state in pair)))


def test_what_does_not_fit():
    found = run_ranks(replica_programs.refused, 4)
    for rank in range(4):
        mine = found[rank]
        assert mine["sum"] == ("ValueError: replicas: [2, 1] are 3 ranks in all, and there are 4")
        assert mine["division"] == "ValueError: replicas: 3 for every stage do not divide 4 ranks"
        assert mine["zero"] == "ValueError: replicas[1]: expected at least 1, got 0"
        assert mine["type"] == "TypeError: replicas: expected a number, or one per stage, got str"
        assert mine["dealt"] == (
            "ValueError: replicas: stage 1 has 3, which must divide the 4 microbatches of a "
            "minibatch"
        )
        assert "stage 1 of 2, 2 microbatches on each of its 3 replicas" in mine["window"]
        assert "expected the same number everywhere, got [1, 3]" in mine["entry"]
        assert mine["stale"].startswith(
            "ValueError: replicas: method 'dc-asgd' corrects gradients of stage 0 by the stale "
            "weights that they read, of which its 2 replicas have different ones"
        )
        assert mine["unlike"].endswith("all must have the same")
        assert re.search(r"replicas: rank \d has \[\d, \d\] and rank \d has", mine["unlike"])
        assert mine["weights"] == (
            "ValueError: stage: the replicas of stage 1 must start from the same weights and "
            "options; '0.bias' of rank 2 is not that of rank 3"
        )
        assert mine["options"] == (
            "ValueError: stage: the replicas of stage 0 must start from the same weights and "
            "options; the optimizer's 'lr' of parameter group 0 is 0.04 on rank 0 and 0.03 on "
            "rank 1"
        )


def test_a_batch_of_too_few_samples_ends_the_run():
    told = "batches[2]: it makes 1 microbatches, and stage 1 has 2 replicas, each of which needs"
    for end in Ranks(replica_programs.too_small, 3).join():
        assert end.code == 1, end.error
        assert told in end.error


@pytest.mark.parametrize(
    ("counts", "culprit", "fault", "where", "when", "method"),
    [
        ([2], 1, "kill", "backward", 7, "vanilla"),
        ([3], 0, "kill", "backward", 8, "sync"),
        ([2, 1], 1, "exception", "forward", 4, "spectrain"),
        ([1, 2], 2, "hang", "backward", 5, "1f1b"),
    ],
    ids=["kill one of two", "kill one of three", "exception", "hang"],
)
def test_a_failing_replica_ends_all(counts, culprit, fault, where, when, method):
    trial = {
        "counts": counts,
        "culprit": culprit,
        "fault": fault,
        "where": where,
        "when": when,
        "method": method,
        "timeout": 4.0,
    }
    ends = Ranks(replica_programs.failing, sum(counts), trial).join()
    told = "\n".join(f"rank {rank}: {end.code}\n{end.error}" for rank, end in enumerate(ends))
    own = -9 if fault == "kill" else 1
    assert [e.code for e in ends] == [own if r == culprit else 1 for r in range(len(ends))], told
    for rank, end in enumerate(ends):
        if rank != culprit:
            assert f"first cause: rank {culprit}, " in end.error, told


def test_gradients_are_summed_while_the_backward_runs():
    for events in run_ranks(replica_programs.overlap, 2):
        kinds = [kind for kind, _ in events]
        # four microbatches, two per replica: the sums belong to the second backward
        gradients = [n for n, kind in enumerate(kinds) if kind == "gradient"]
        assert [events[n][1] for n in gradients] == [*range(11, -1, -1)] * 2
        sums = [n for n, kind in enumerate(kinds) if kind == "sum"]
        assert sums[0] > gradients[12]  # not in the first backward
        assert sum(gradients[12] < n < gradients[-1] for n in sums) >= 3, events
        assert sums[-1] < kinds.index("step")


def test_a_stage_without_parameters_and_a_trace():
    parts = [*stages(1), torch.nn.Tanh(), *stages(1)]
    pipe = st.Pipeline(parts, sgd, mse, "sync", microbatches=4)
    expected = [result.loss.item() for result in pipe.run(data(3))]
    for rank, (losses, spans) in enumerate(run_ranks(replica_programs.plain, 4)):
        assert losses == pytest.approx(expected, rel=1e-12)
        own = 2 if rank in (1, 2) else 4  # microbatches of a replica
        assert spans == [([0, 1, 1, 2][rank], i, j) for i in range(3) for j in range(own)]


def test_parameters_that_not_every_replica_has_a_gradient_of():
    part = replica_programs.Choosy()
    pipe = st.Pipeline([part], sgd, mse, "gpipe", microbatches=2)
    list(pipe.run(data(9)))
    (first, masters, moved), (second, others, _) = run_ranks(replica_programs.choosy, 2)
    for name, tensor in part.state_dict().items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-12, atol=1e-14)
        assert torch.equal(first[name], second[name]), name
    assert torch.equal(first["never"], torch.ones_like(first["never"]))  # not even decayed
    assert not torch.equal(first["sometimes"], torch.ones_like(first["sometimes"]))
    # bfloat16 parameters: gradients are summed in their dtype
    assert all(moved)
    assert all(map(torch.equal, masters, others))


def test_one_stage_with_two_replicas_is_data_parallel_training():
    for theirs, own, expected, found in run_ranks(replica_programs.against_ddp, 2):
        assert own == pytest.approx(theirs, rel=1e-12)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_checkpoint_of_an_optimizer_whose_state_is_sharded(tmp_path):
    for kept, loaded in run_ranks(replica_programs.sharded_checkpoint, 2, str(tmp_path / "c")):
        assert kept == loaded
