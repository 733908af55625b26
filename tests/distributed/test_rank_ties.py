"""Tied weights over processes: the bits of one process."""

from __future__ import annotations

import pytest
import torch
from helpers import rank_pipelines
from helpers.ranks import run_ranks

import spectrain_ext as st

pytestmark = pytest.mark.processes

METHODS = [name for name in st.methods() if name != "xgrad"]  # which is for one stage
RUNS = [(9, 8, 5), (0,), (5, 8, 1)]


@pytest.mark.parametrize(
    ("n", "places", "methods"),
    [
        (2, (0, 1), METHODS),
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
