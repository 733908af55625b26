"""Dicts between ranks, and batches that are mappings: the bits of tuples in one process."""

from __future__ import annotations

import pytest
import torch
from helpers import value_programs
from helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

SIZES = [8, 8, 8, 8, 8, 5]
CASES = [
    ("dataclass", {"method": "spectrain", "microbatches": 3, "offload": "activations"}),
    ("dict", {"method": "auto", "microbatches": 2, "recompute": True}),
]


def test_two_processes_give_the_bits_of_one():
    torch.set_num_threads(1)
    found = run_ranks(value_programs.apart, 2, SIZES, CASES)
    for c, (_, settings) in enumerate(CASES):
        losses, states = value_programs.together(2, SIZES, "tuple", **settings)
        for rank in range(2):
            its_losses, state = found[rank][c]
            assert its_losses == [loss.item() for loss in losses]
            for name, tensor in states[rank].items():
                assert torch.equal(state[name], tensor), (rank, name)


def test_replicas():
    """Rank 0 deals microbatches of dicts out to the other replica, and to the last stage."""
    torch.set_num_threads(1)
    settings = {"method": "gpipe", "microbatches": 4}
    cases = [("named", {**settings, "replicas": [2, 1]})]
    found = run_ranks(value_programs.apart, 3, SIZES, cases, 0.0)
    expected, states = value_programs.together(2, SIZES, "tuple", drop=0.0, **settings)
    for rank in range(3):
        [(losses, state)] = found[rank]
        assert losses == pytest.approx([loss.item() for loss in expected], rel=1e-5)
        for name, tensor in states[max(rank - 1, 0)].items():
            torch.testing.assert_close(state[name], tensor)


def test_samples_along_another_dimension():
    torch.set_num_threads(1)
    found = run_ranks(value_programs.time_first, 2)
    losses, measured, state = value_programs.time_first()
    for rank in range(2):
        assert found[rank][:2] == (losses, measured)
        for name, tensor in found[rank][2].items():
            assert torch.equal(state[name], tensor), (rank, name)
