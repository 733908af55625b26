"""Tests models that each rank cuts itself: every part keeps the model's names."""

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
    assert first[0].endswith("block 1 (Fails) fails on (4, 3) float32: ArithmeticError: planned")
    assert second[0].startswith("RuntimeError: model: rank 0, whose cut is everybody's, could not")
    for found, there in ((first, 3), (second, 4)):
        assert f"{there} blocks here, and on other ranks 3 to 4" in found[1]
    assert its_ends == ends


@pytest.mark.parametrize("kind", ["untied", "tied", "experts", "images"])
def test_a_decoder_as_in_one_process(kind):
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    losses, state, said = model_programs.decoder(0, 1, kind)
    assert not said
    found = {}
    for rank, (others, part, said) in enumerate(run_ranks(model_programs.decoder, 3, kind)):
        assert len(said) == 1
        assert f"trained stages {[k for k in range(3) if k != rank]} of this model" in said[0]
        assert others == pytest.approx(losses, rel=1e-6)
        found.update(part)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


def test_an_adapted_model_is_whole_on_every_rank(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.set_num_threads(1)
    said, adapter, trained, whole = model_programs.adapters(0, 1, None)
    assert len(trained) == 4 * 2
    for theirs, its_adapter, its_trained, its_whole in run_ranks(
        model_programs.adapters, 2, str(tmp_path / "model")
    ):
        assert torch.equal(theirs, said)
        assert its_adapter.keys() == adapter.keys()
        assert its_trained.keys() == trained.keys()
        assert all(torch.equal(value, adapter[name]) for name, value in its_adapter.items())
        assert all(torch.equal(value, whole[name]) for name, value in its_whole.items())


def test_what_one_rank_has_unfrozen_ends_all_ranks():
    first, second = run_ranks(model_programs.unfreezing, 2)
    why = "stages[1]: parameter 'bias' was unfrozen since the pipeline was made"
    assert second.startswith(f"RuntimeError: {why}")
    assert first.startswith("RankError: rank") and why in first
