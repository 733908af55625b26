"""Tests frozen parameters, and frozen tensors that their modules refuse to load."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_cases import LOSS, batches, body_of, ends, halving, model, sgd, train
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.checkpoint import load, save
from spectrain_ext.partitioning import cut_at


def test_state_of_parameters_that_are_frozen_now(saved: Path) -> None:
    other = model(seed=1)
    other[0].requires_grad_(False)
    other[3].linear.bias.requires_grad_(False)
    pipe = st.Pipeline(cut_at(other, [1, 4]), sgd, LOSS, "spectrain", scheduler=halving)
    with pytest.warns(UserWarning) as warned:
        load(saved, pipe)
    assert [str(each.message).partition(" is not loaded")[0] for each in warned] == [
        "stage 0: the optimizer state of 0.linear.weight, 0.linear.bias, 0.norm.weight and 1 more",
        "stage 1: the optimizer state of 3.linear.bias",
    ]
    pipe.release()
    load(saved, other)  # without an optimizer


class Quantized(nn.Module):
    """Gives its frozen weight with a scale under another name, as layers of bitsandbytes do."""

    takes_back = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        dense = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.scale = dense.abs().max() / 127
        packed = (dense / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale) + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.takes_back:
            self.scale = state_dict.pop(prefix + "weight.scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Restored(Quantized):
    takes_back = True


def quantized(n: int, kind: type[Quantized] = Quantized, seed: int = 0) -> st.Pipeline:
    torch.manual_seed(seed)
    blocks = [layer for k in range(3) for layer in (kind(k), nn.Linear(4, 4), nn.Tanh())]
    return st.Pipeline(cut_at(nn.Sequential(*blocks), ends(9, n)), sgd, LOSS, "sync")


def test_frozen_weights_that_a_module_refuses_to_load(tmp_path: Path) -> None:
    kept = quantized(3)
    train(kept, batches(2))
    with pytest.warns(UserWarning, match=r"stage 1: 3\.weight, 3\.weight\.scale are not saved"):
        save(tmp_path / "c", kept)
    assert [stage["left_out"] for stage in body_of(tmp_path / "c")["stages"]] == [
        [f"{k}.weight", f"{k}.weight.scale"] for k in (0, 3, 6)
    ]
    expected = train(kept, batches(2, seed=1))
    for n in (3, 2):
        other = quantized(n, seed=9)
        with pytest.warns(UserWarning, match=r"stage 0: 0\.weight, .* keep their present values"):
            load(tmp_path / "c", other)
        assert train(other, batches(2, seed=1)) == expected


@pytest.mark.parametrize("takes_back", [False, True])
def test_packed_weights_that_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_back: bool
) -> None:
    """Those of a module that loads them, and those of an earlier version of this package."""
    kept = quantized(3, Restored)
    train(kept, batches(2))
    save(tmp_path / "c", kept)
    expected = train(kept, batches(2, seed=1))
    monkeypatch.setattr(Restored, "takes_back", takes_back)
    other = quantized(1, Restored, seed=9)
    with nullcontext() if takes_back else pytest.warns(UserWarning, match="keep their present"):
        load(tmp_path / "c", other)
    assert train(other, batches(2, seed=1)) == expected
