"""Dicts between ranks, and batches that are mappings: the bits of tuples in one process."""

from __future__ import annotations

import pytest
import torch
from helpers import value_programs
from helpers.ranks import Ranks, run_ranks

pytestmark = pytest.mark.processes

SIZES = [8, 8, 8, 8, 8, 5]
CASES = [
    ("dataclass", {"method": "spectrain", "microbatches": 3}),
    ("dict", {"method": "auto", "microbatches": 2, "targets_from": "first", "recompute": True}),
]


def test_two_processes_give_the_bits_of_one():
    torch.set_num_threads(1)
    found = run_ranks(value_programs.apart, 2, SIZES, CASES)
    for c, (_, settings) in enumerate(CASES):
        settings = {key: of for key, of in settings.items() if key != "targets_from"}
        losses, states = value_programs.together(2, SIZES, "tuple", **settings)
        for rank in range(2):
            its_losses, state = found[rank][c]
            assert its_losses == [loss.item() for loss in losses]
            for name, tensor in states[rank].items():
                assert torch.equal(state[name], tensor), (rank, name)


def test_replicas():
    """Both replicas of stage 0, and the last stage, take their microbatches out of dicts."""
    torch.set_num_threads(1)
    settings = {"method": "gpipe", "microbatches": 4}
    ways = "last", "first"
    cases = [("named", {**settings, "replicas": [2, 1], "targets_from": way}) for way in ways]
    found = run_ranks(value_programs.apart, 3, SIZES, cases, 0.0)
    expected, states = value_programs.together(2, SIZES, "tuple", drop=0.0, **settings)
    for c, way in enumerate(ways):
        for rank in range(3):
            losses, state = found[rank][c]
            assert losses == pytest.approx([loss.item() for loss in expected], rel=1e-5), way
            for name, tensor in states[max(rank - 1, 0)].items():
                torch.testing.assert_close(state[name], tensor)


def test_dicts_of_another_batch_end_the_run():
    first, last = Ranks(value_programs.feeding_others, 2).join()
    said = "batches[2]: this is the first one that is not rank 0's, neither by its input"
    assert last.code == 1 and said in last.error
    assert first.code == 1 and "first cause: rank 1" in first.error


def test_samples_along_another_dimension():
    torch.set_num_threads(1)
    found = run_ranks(value_programs.time_first, 2)
    losses, measured, state = value_programs.time_first()
    for rank in range(2):
        assert found[rank][:2] == (losses, measured)
        for name, tensor in found[rank][2].items():
            assert torch.equal(state[name], tensor), (rank, name)
