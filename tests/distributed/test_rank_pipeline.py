"""Tests distributed pipelines against the in-process bits, and that all ranks end together."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import rank_pipelines, rank_programs
from helpers.ranks import Ranks, run_ranks

import spectrain_ext as st

pytestmark = pytest.mark.processes

METHODS = [name for name in st.methods() if name != "xgrad"]  # a method for one stage
RUNS = [(11, 8, 5), (3,), (0,), (6, 8, 1)]


@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 3)), 4])
def test_every_method_gives_the_same_bits_as_in_one_process(n):
    torch.set_num_threads(1)
    found = run_ranks(rank_pipelines.apart, n, METHODS, RUNS)
    for method in METHODS:
        losses, states, optimizers = rank_pipelines.together(method, n, RUNS)
        of_method = [rank[method] for rank in found]
        assert of_method[-1][0] == losses, method
        if method == "vanilla":
            for rank in range(n - 1):
                shared = [[loss.item() for loss in run] for run in of_method[rank][0]]
                assert shared == [[loss.item() for loss in run] for run in losses]
        else:
            assert "share_loss=True" in of_method[0][0][0]
        for rank in range(n):
            _, state, optimizer = of_method[rank]
            same(state, states[rank], f"{method}, rank {rank}")
            same(optimizer["state"], optimizers[rank]["state"], f"{method}, rank {rank}")


@pytest.mark.parametrize("name", ["Muon", "Lion"])
def test_optimizers_that_are_not_the_packages(name):
    methods = ["sync", "vanilla", "pipedream", "lwp-w"]
    torch.set_num_threads(1)
    found = run_ranks(rank_pipelines.apart, 2, methods, RUNS, name)
    for method in methods:
        losses, states, optimizers = rank_pipelines.together(method, 2, RUNS, name)
        assert found[-1][method][0] == losses, method
        for rank in range(2):
            _, state, optimizer = found[rank][method]
            same(state, states[rank], f"{method}, rank {rank}")
            same(optimizer["state"], optimizers[rank]["state"], f"{method}, rank {rank}")


@pytest.mark.parametrize("way", ["staged", "apart"])
def test_the_way_of_bodies_does_not_change_the_bits(way):
    methods = ["vanilla", "gpipe", "spectrain"]
    torch.set_num_threads(1)
    found = run_ranks(rank_programs.travels, 3, way, rank_pipelines.apart, methods, RUNS)
    for method in methods:
        losses, states, _ = rank_pipelines.together(method, 3, RUNS)
        assert found[-1][method][0] == losses, method
        for rank in range(3):
            same(found[rank][method][1], states[rank], f"{method}, rank {rank}")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("replicas", "method"), [([1, 1], "spectrain"), ([1, 2], "gpipe")], ids=["stages", "replicas"]
)
def test_ranks_on_one_gpu_give_the_bits_of_one_process_there(replicas, method, device="cuda:0"):
    found = run_ranks(rank_pipelines.scaled_apart, sum(replicas), replicas, method, device)
    losses, states = rank_pipelines.scaled_together(method, device)
    for rank, (backend, staged, of_rank, state) in enumerate(found):
        assert (backend, staged) == ("gloo", device != "cpu")
        assert of_rank == pytest.approx(losses, rel=1e-6)  # replicas add theirs in float64
        same(state, states[min(rank, 1)], f"rank {rank}")


HYBRIDS = [
    "pipedream+sync@7",
    "1f1b+vanilla@11",  # at the end of a run
    st.hybrid("auto", "1f1b", after=3),
    st.hybrid("pipedream", after=None, gap=0.02),
]


@pytest.mark.parametrize("places", [(), (0, 2)], ids=["untied", "tied"])
def test_methods_that_change_do_so_at_the_same_minibatch_everywhere(places):
    torch.set_num_threads(1)
    found = run_ranks(rank_pipelines.apart, 3, HYBRIDS, RUNS, None, places)
    for method in HYBRIDS:
        losses, states, optimizers = rank_pipelines.together(method, 3, RUNS, None, places)
        assert found[-1][method][0] == losses, method
        for rank in range(3):
            _, state, optimizer = found[rank][method]
            same(state, states[rank], f"{method}, rank {rank}")
            same(optimizer["state"], optimizers[rank]["state"], f"{method}, rank {rank}")


@pytest.mark.parametrize("method", ["1f1b+gpipe@4", "gpipe+1f1b@8"])
def test_replicas_change_together(method):
    found = run_ranks(rank_pipelines.scaled_apart, 3, [1, 2], method, "cpu")
    losses, states = rank_pipelines.scaled_together(method, "cpu")
    for rank, (_, _, of_rank, state) in enumerate(found):
        assert of_rank == pytest.approx(losses, rel=1e-6)
        same(state, states[min(rank, 1)], f"rank {rank}")


@pytest.mark.parametrize("after", [3, 6, 8])
@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_a_run_is_left_where_the_method_changes(leaves, after):
    """For any leaving rank, its last minibatches in flight belong to the phase or precede it."""
    method = f"pipedream+sync@{after}"
    made = run_ranks(rank_pipelines.leaving, 3, leaves, 5, method)
    counts = {tuple(steps) for _, steps in made}
    assert len(counts) == 1, made
    first, second = counts.pop()
    assert second == first + 4
    assert first == (30 if leaves else rank_pipelines.left_together(3, 5, method))


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_rank_0_decides_when_the_run_ends(leaves):
    made = run_ranks(rank_pipelines.leaving, 3, leaves, 5)
    counts = {tuple(steps) for _, steps in made}
    assert len(counts) == 1, made  # all stages made the same updates in both runs
    first, second = counts.pop()
    assert second == first + 4
    assert first == (30 if leaves else rank_pipelines.left_together(3, 5))
    assert [seen for seen, _ in made] == [6 if rank == leaves else first for rank in range(3)]


def test_what_ranks_must_agree_on():
    found = run_ranks(rank_pipelines.disagreeing, 2)
    assert found[0]["method"] == (
        "method: rank 0 has 'vanilla' and rank 1 has 'spectrain'; all must have the same"
    )
    same = "; all must have the same"
    assert found[1]["horizon"] == (
        f"method: forward_horizon of 'spectrain': rank 1 has [1, 2] and rank 0 has [0, 1]{same}"
    )
    assert "law of 'spectrain': rank 0 has ['linear', 'linear']" in found[0]["law"]
    assert found[0]["rates"].startswith("method: rates of 'pipemare', phase 1: rank 0 has [0.33")
    assert found[0]["gap"] == (
        f"method: then of 'hybrid': rank 0 has [1000, 0.1] and rank 1 has [1000, 1.1]{same}"
    )
    assert "rank 0 has [0.403" in found[0]["clip"]
    assert "rank 1 has 2 and rank 0 has 1" in found[1]["microbatches"]
    assert found[0]["count"] == f"count: rank 0 has 'given' and rank 1 has 'none'{same}"
    assert "codec: rank 0 has ['Int8(block=64, seed=0)', 'Int8(block=64," in found[0]["codec"]
    assert "first cause: rank 1, meeting: TypeError: optimizer" in found[0]["optimizer"]
    assert "expected a torch.optim.Optimizer" in found[1]["optimizer"]
    assert all("stages train 0 of the 2 matrices in hidden" in each["hidden"] for each in found)
    for rank in found:
        assert rank["frozen"].startswith("stages: none has a trainable parameter")
        assert "partly frozen" not in rank
    assert found[0]["no batches"] == "batches: rank 0 needs them, got None"


@pytest.mark.parametrize(
    ("culprit", "when"), [(0, "earlier"), (1, "sooner"), (0, "later"), (2, "later"), (1, "hangs")]
)
def test_a_rank_that_fails_while_links_are_opened(culprit, when):
    ends = Ranks(rank_pipelines.opening, 3, culprit, when).join()
    assert [end.code for end in ends] == [1, 1, 1]
    planned = "busy with it for" if when == "hangs" else "ArithmeticError: planned"
    for rank, end in enumerate(ends):
        if rank != culprit or when == "hangs":
            assert f"rank {rank}, " in end.error
            assert re.search(f"first cause: rank {culprit}, .*{planned}", end.error), end.error
        else:
            assert "ArithmeticError: planned" in end.error


@pytest.mark.parametrize(("culprit", "late", "keeper"), [(0, False, False), (1, True, True)])
def test_a_rank_that_does_not_make_its_pipeline(culprit, late, keeper):
    ranks = Ranks(rank_pipelines.missing, 3, culprit, late, keeper=keeper)
    ends = ranks.join(but=() if late else (culprit,))
    for rank, end in enumerate(ends):
        if rank != culprit or late:
            cause = f"rank {culprit}, meeting: it has not come within 5.0 s"
            assert end.code == 1
            assert f"RankError: rank {rank}, meeting; first cause: {cause}" in end.error


def test_rank_0_keeps_the_store_and_ends_early():
    first, *others = Ranks(rank_pipelines.leaving_early, 3, keeper=False).join()
    assert "timeout: expected a positive number of seconds" in first.error
    for end in others:
        assert end.code == 1
        assert "first cause: rank 0, last known in starting: its process has ended" in end.error


def test_only_rank_0_has_batches():
    first, middle, last = run_ranks(rank_pipelines.feeding, 3)
    assert last["ignored"] == last["none"] == last["alone"]
    assert [first, middle] == [{"ignored": 5, "none": 5}] * 2


def test_shapes_that_grow_are_allowed_on_request():
    assert run_ranks(rank_pipelines.growing, 2, True)[1] == [2, 5, 3, 9]
    first, last = Ranks(rank_pipelines.growing, 2, False).join()
    assert (first.code, last.code) == (1, 1)
    assert "edge 0 -> 1 of targets was opened for" in last.error
    assert "dynamic_shapes=False" in last.error


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        st.DistributedPipeline(
            torch.nn.Linear(2, 2), rank_pipelines.optimizer, torch.nn.functional.mse_loss
        )


def same(found, expected, where):
    assert found.keys() == expected.keys(), where
    for key, value in expected.items():
        if isinstance(value, dict):
            same(found[key], value, where)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), f"{where}: {key}"
        else:
            assert found[key] == value, f"{where}: {key}"


# The last update comes when the rank has sent everything.
@pytest.mark.parametrize("update", [4, 10])
def test_a_rank_that_is_interrupted_has_its_true_weights(tmp_path, update):
    path = tmp_path / "weights"
    ends = Ranks(rank_pipelines.interrupted, 3, str(path), "spectrain", update).join()
    assert all(end.code for end in ends)
    assert path.read_text() == "true"
