"""Tests dicts between ranks and mappings as batches against tuples in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import replica_programs, value_programs
from helpers.ranks import run_ranks

import spectrain_ext as st
from spectrain_ext.codecs import BFloat16, Float8, Int4, Int8

pytestmark = pytest.mark.processes

SIZES = [8, 8, 8, 8, 8, 5]
CASES = [
    ("dataclass", {"method": "spectrain", "microbatches": 3, "offload": "activations"}),
    ("dict", {"method": "auto", "microbatches": 2, "recompute": True}),
    ("dict", {"method": "auto", "microbatches": 3, "codec": Int4(hadamard=True)}),
    ("dict", {"method": "spectrain", "recompute": True, "codec": (Int8(), BFloat16())}),
    ("tensor", {"method": "1f1b", "microbatches": 2, "codec": (None, Float8())}),
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
    """Rank 0 distributes microbatches of dicts to the other replica and to the last stage."""
    torch.set_num_threads(1)
    settings = {"method": "gpipe", "microbatches": 4}
    codecs = None, Int8()  # its draws belong to a microbatch, whichever rank computes it
    cases = [("named", {**settings, "replicas": [2, 1], "codec": codec}) for codec in codecs]
    found = run_ranks(value_programs.apart, 3, SIZES, cases, 0.0)
    for c, codec in enumerate(codecs):
        expected, states = value_programs.together(
            2, SIZES, "tuple", drop=0.0, codec=codec, **settings
        )
        for rank in range(3):
            losses, state = found[rank][c]
            assert losses == pytest.approx([loss.item() for loss in expected], rel=1e-5)
            for name, tensor in states[max(rank - 1, 0)].items():
                torch.testing.assert_close(state[name], tensor)


def test_losses_by_tokens():
    """The uncut model's mean over all tokens, wherever the long microbatches are."""
    cases = [
        ([1, 2], "1f1b", {"microbatches": 4, "share_loss": True, "clip_norm": 0.05}),
        ([2, 1], "1f1b", {"microbatches": 4, "share_loss": True}),
        ([2, 1], "gpipe", {"microbatches": 4, "count": replica_programs.counting}),
        ([2, 1], "auto", {"microbatches": 4}),
    ]
    found = run_ranks(replica_programs.counted, 3, cases)
    for c, (counts, method, settings) in enumerate(cases):
        settings = {key: value for key, value in settings.items() if key != "share_loss"}
        stages = [replica_programs.words(k) for k in range(2)]
        pipe = st.Pipeline(
            stages, replica_programs.sgd, replica_programs.total_and_count, method, **settings
        )
        expected = [result.loss.item() for result in pipe.run(replica_programs.sentences())]
        epoch = pipe.fit(list(replica_programs.sentences(3)))
        evaluated = pipe.evaluate(list(replica_programs.sentences(2)))
        for rank in range(3):
            losses, its_epoch, its_evaluated, state = found[rank][c]
            k = replica_programs.stage_and_replica(counts, rank)[0]
            if method == "auto":  # its replicas read other versions
                continue
            if k == 1 or c < 2:
                assert losses == pytest.approx(expected, rel=1e-12)
            assert its_epoch == pytest.approx(epoch)
            assert its_evaluated["loss"] == pytest.approx(evaluated["loss"])
            theirs = pipe.state_dict()
            for name, tensor in state.items():
                key = name if name in theirs else f"{k}.{name}"
                torch.testing.assert_close(tensor, theirs[key], rtol=1e-9, atol=1e-12)


def test_samples_along_another_dimension():
    torch.set_num_threads(1)
    found = run_ranks(value_programs.time_first, 2)
    losses, measured, state = value_programs.time_first()
    for rank in range(2):
        assert found[rank][:2] == (losses, measured)
        for name, tensor in found[rank][2].items():
            assert torch.equal(state[name], tensor), (rank, name)


@pytest.mark.parametrize("codec", [None, Int4()], ids=str)
def test_nested_values_and_microbatches_cut_by_the_caller(codec):
    """Bit for bit; objects that cannot be sent to another process are rejected."""
    torch.set_num_threads(1)
    losses, measured, state = value_programs.nested(codec=codec)
    found = run_ranks(partial(value_programs.nested, codec=codec), 2)
    for rank in range(2):
        assert found[rank][:2] == (losses, measured)
        for name, tensor in found[rank][2].items():
            assert torch.equal(state[name], tensor), (rank, name)
    assert found[0][3].startswith("TypeError: batches[0]['words'][0]: expected a tensor, or ")
    assert found[0][3].endswith("got a set")


def test_replicas_get_the_microbatches_that_the_caller_has_cut():
    torch.set_num_threads(1)
    losses, measured, state = value_programs.nested()
    found = run_ranks(partial(value_programs.nested, replicas=[1, 2]), 3)
    for rank in range(3):
        assert found[rank][0] == pytest.approx(losses, rel=1e-5)
        assert found[rank][1] == pytest.approx(measured, rel=1e-5)
        for name, tensor in found[rank][2].items():
            torch.testing.assert_close(state[name], tensor)


def test_codecs_between_the_stages_of_a_rank():
    """Bit for bit in two runs, an evaluation and a call; the bytes are counted."""
    torch.set_num_threads(1)
    losses, measured, output, sent, state = value_programs.coded()
    found = run_ranks(value_programs.coded, 2)
    for rank in range(2):
        its_losses, its_measured, its_output, its_sent, its_state = found[rank]
        assert (its_losses, its_measured) == (losses, measured)
        assert (its_output is None) == (rank == 0)
        assert rank == 0 or torch.equal(its_output, output)
        assert its_sent == {k: bytes_ for k, bytes_ in sent.items() if k % 2 == rank}
        for name, tensor in its_state.items():
            assert torch.equal(state[name], tensor), (rank, name)
