"""Models over processes: each rank cuts its own, and has its part under the model's names."""

from __future__ import annotations

import pytest
import torch
from helpers import model_programs
from helpers.ranks import run_ranks

pytestmark = pytest.mark.processes


def test_a_rank_takes_its_own_out_of_a_whole_state_dict():
    whole = model_programs.named().state_dict()
    found = {}
    for state, unknown, error in run_ranks(model_programs.loads_whole_dicts, 3):
        assert unknown == []
        assert 'Missing key(s) in state_dict: "' in error
        assert "Unexpected" not in error
        found.update(state)
    assert list(found) == list(whole)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor + 1), name


def test_cuts_are_rank_0s_or_nobodys():
    (first, its_ends), (second, ends) = run_ranks(model_programs.cuts, 2)
    assert first[0] == "ArithmeticError: planned"
    assert second[0].startswith("RuntimeError: model: rank 0, whose cut is everybody's, could not")
    for found, there in ((first, 3), (second, 4)):
        assert f"{there} blocks here, and on other ranks 3 to 4" in found[1]
    assert its_ends == ends


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_as_in_one_process(tied):
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    losses, state = model_programs.decoder(0, 1, tied)
    found = {}
    for others, part in run_ranks(model_programs.decoder, 3, tied):
        assert others == pytest.approx(losses, rel=1e-6)
        found.update(part)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
