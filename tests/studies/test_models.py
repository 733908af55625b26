"""Tests the command line's model: a function of seed and sizes, cut anywhere."""

import pytest
import torch
from torch import nn

from studies.models.building import cut_evenly
from studies.models.mlp import ResidualBlock, residual_mlp


def _weights(stages: list[nn.Module]) -> list[torch.Tensor]:
    return [parameter.detach() for stage in stages for parameter in stage.parameters()]


def test_eight_stages_are_linear_six_blocks_and_head() -> None:
    first, *blocks, last = residual_mlp(8)
    assert isinstance(first, nn.Sequential)
    assert [type(layer) for layer in first] == [nn.Flatten, nn.Linear]
    assert first[1].weight.shape == (64, 64)
    assert len(blocks) == 6
    assert all(isinstance(block, ResidualBlock) for block in blocks)
    assert isinstance(last, nn.Sequential)
    assert [type(layer) for layer in last] == [nn.LayerNorm, nn.Linear]
    assert last[1].weight.shape == (10, 64)


def test_a_block_adds_to_its_input() -> None:
    block = ResidualBlock(4)
    x = torch.randn(3, 4)
    expected = x + block.project(torch.relu(block.expand(block.norm(x))))
    torch.testing.assert_close(block(x), expected)
    nn.init.zeros_(block.project.weight)
    nn.init.zeros_(block.project.bias)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7])
def test_fewer_stages_cut_the_same_model(stages: int) -> None:
    whole, cut = residual_mlp(8, seed=3), residual_mlp(stages, seed=3)
    assert len(cut) == stages
    pairs = zip(_weights(whole), _weights(cut), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    x = torch.randn(5, 64)
    torch.testing.assert_close(nn.Sequential(*cut)(x), nn.Sequential(*whole)(x))


def test_seed_decides_and_the_global_state_does_not() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = _weights(residual_mlp(4, seed=5))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(
        torch.equal(a, b) for a, b in zip(first, _weights(residual_mlp(4, seed=5)), strict=True)
    )
    assert not torch.equal(first[0], _weights(residual_mlp(4, seed=6))[0])


@pytest.mark.parametrize("layers", range(1, 12))
def test_cut_evenly_keeps_order_and_balance(layers: int) -> None:
    modules = [nn.Identity() for _ in range(layers)]
    for stages in range(1, layers + 1):
        groups = [
            list(group) if isinstance(group, nn.Sequential) else [group]
            for group in cut_evenly(modules, stages)
        ]
        assert [layer for group in groups for layer in group] == modules
        lengths = [len(group) for group in groups]
        assert len(lengths) == stages
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("stages", [-1, 0, 3])
def test_cut_evenly_refuses_what_it_cannot_cut(stages: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and the 2 layers, got {stages}"):
        cut_evenly([nn.Identity(), nn.Identity()], stages)
