"""Tests measuring blocks: seconds and bytes, and no change to the model."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from helpers import value_programs
from helpers.cut_models import Calls
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.partitioning import measure

PAIR = Calls(lambda _, pair: (pair[0] * 2.0, pair[1]))
ODD = Calls(lambda _, x: [x, {1}])


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.cache = torch.ones(4)
        return x - self.mean


def test_measuring_changes_nothing() -> None:
    norm, drop, relu = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True)
    blocks = [nn.Sequential(nn.Linear(4, 4), norm, drop, relu), nn.ReLU(inplace=True), Averages()]
    mean = blocks[2].mean
    kept = [torch.full_like(p, 7.0) for p in blocks[0].parameters()]
    for p, gradient in zip(blocks[0].parameters(), kept, strict=True):
        p.grad = gradient
    blocks.append(nn.Linear(4, 4))
    before = copy.deepcopy([block.state_dict() for block in blocks])
    example = torch.randn(5, 4)
    copied, random = example.clone(), torch.get_rng_state()
    measure(blocks, example, repeats=2)
    st.partition(blocks, 2, example)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(example, copied)
    for block, state in zip(blocks, before, strict=True):
        for name, tensor in block.state_dict().items():
            assert torch.equal(tensor, state[name]), name
    for p, gradient in zip(blocks[0].parameters(), kept, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, torch.full_like(p, 7.0))
    assert all(p.grad is None for p in blocks[3].parameters())
    assert blocks[2].mean is mean
    assert blocks[2].cache is None


@pytest.mark.parametrize(
    ("blocks", "example", "outputs"),
    [
        ([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)], torch.randn(3, 4), [96, 96, 24]),
        ([nn.Embedding(5, 3), nn.Identity()], torch.tensor([1, 2]), [24, 24]),
        ([PAIR], (torch.randn(2), torch.tensor([1, 2])), [8 + 16]),
        ([nn.ReLU(), ODD], torch.zeros(3), [12, 12]),
    ],
    ids=["layers", "integers", "pair", "anything at the end"],
)
def test_bytes_of_outputs(blocks: list[nn.Module], example: Any, outputs: list[int]) -> None:
    profile = measure(blocks, example, repeats=1)
    assert [block.output_bytes for block in profile.blocks] == outputs
    assert all(block.seconds > 0 for block in profile.blocks)
    if len(blocks) == 3:
        assert [block.parameter_bytes for block in profile.blocks] == [160, 0, 72]
        # a Linear keeps its input, a Tanh its output
        assert [block.saved_bytes for block in profile.blocks] == [48, 96, 96]


def test_a_slower_block_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [0]  # a simulated clock
    monkeypatch.setattr("time.perf_counter", lambda: layers[0])

    class Many(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.times = times

        def forward(self, x: Tensor) -> Tensor:
            layers[0] += self.times
            return self.linear(x)

    slow = st.partition([Many(200), Many(1), Many(1)], 2, torch.randn(3, 4))
    assert slow.cut.ends == (1, 3)
    assert slow.cut.bottleneck == 0
    # on a device of four times the speed it is as fast as the others
    quick = st.partition([Many(2), Many(2), Many(1)], 2, torch.randn(3, 4), speeds=(4, 1))
    assert quick.cut.ends == (2, 3)


def test_complex_numbers_are_measured_with_their_gradients() -> None:
    def inverse(_: nn.Module, x: Tensor) -> Tensor:
        x.register_hook(seen.append)
        return torch.fft.irfft(x)

    seen: list[Tensor] = []
    blocks = [nn.Linear(4, 4), Calls(lambda _, x: torch.fft.rfft(x)), Calls(inverse)]
    measure(blocks, torch.randn(3, 4), repeats=1)
    assert [gradient.dtype for gradient in seen] == [torch.complex64] * 2


def test_dicts_from_block_to_block_take_the_bytes_of_tuples() -> None:
    """The last block returns a dataclass."""
    found = {}
    for form in ("dict", "tuple"):
        (batch,) = value_programs.data([4], form)
        example = UserDict(batch) if form == "dict" else batch[0]
        blocks = value_programs.stages(3, form, "dataclass")
        parts = st.partition(blocks, 2, example)
        found[form] = [(b.output_bytes, b.parameter_bytes) for b in parts.profile.blocks]
        assert all(p.grad is None for block in blocks for p in block.parameters())
    assert found["dict"] == found["tuple"]
    assert [of for of, _ in found["dict"]] == [4 * 4 * 4 + 4 * 4] * 2 + [4 * 4 * 4]


def test_a_cut_by_numbers_of_parameters() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    parts = st.partition(model, 3, torch.tensor([1]), profile="parameters")
    assert [block.seconds for block in parts.profile.blocks] == pytest.approx([0, 2e-8, 2e-8, 2e-8])
    assert [block.parameter_bytes for block in parts.profile.blocks] == [1600, 80, 80, 80]
    assert parts.cut.ends == (2, 3, 4)


@pytest.mark.parametrize(
    ("blocks", "example", "repeats", "error", "why"),
    [
        ([nn.ReLU()], torch.zeros(1), 0, ValueError, "repeats: expected at least 1, got 0"),
        ([nn.ReLU()], torch.zeros(1), -1, ValueError, "repeats: expected at least 1, got -1"),
        ([nn.ReLU(), ODD, nn.ReLU()], torch.zeros(1), 1, TypeError, r"block 1\[1\]: .*got a set"),
        ([nn.ReLU()], [1.0], 1, TypeError, "example_input: expected at least one tensor"),
        ([nn.ReLU()], {"x": None}, 1, TypeError, "expected at least one tensor, got a d"),
    ],
)
def test_bad_arguments(blocks: Any, example: Any, repeats: int, error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        measure(blocks, example, repeats=repeats)
