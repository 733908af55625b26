"""Tests that the self-normalizing MLP keeps mean and variance, and can be cut anywhere."""

import pytest
import torch
from torch import nn

from studies.models.mlp import snn


@pytest.mark.parametrize("training", [False, True], ids=["test", "dropout"])
def test_every_layers_outputs_keep_mean_zero_and_variance_one(training: bool) -> None:
    torch.manual_seed(0)
    layers = snn(17, features=3072, width=256, depth=16)
    values = torch.randn(512, 3, 32, 32)
    for layer in layers[:-1]:
        layer.train(training)
        with torch.no_grad():
            values = layer(values)
        assert values.mean().item() == pytest.approx(0.0, abs=0.1)
        assert values.var().item() == pytest.approx(1.0, abs=0.15)


def test_the_cut_and_the_global_state_change_nothing() -> None:
    state = torch.random.get_rng_state()
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    whole = snn(1, features=48, width=16, depth=7, seed=3)[0].eval()
    for stages in (2, 8):
        cut = snn(stages, features=48, width=16, depth=7, seed=3)
        assert len(cut) == stages
        assert torch.equal(nn.Sequential(*cut).eval()(images), whole(images))
    assert torch.equal(torch.random.get_rng_state(), state)
    other = snn(1, features=48, width=16, depth=7, seed=4)[0].eval()
    assert not torch.equal(other(images), whole(images))
    with pytest.raises(ValueError, match="between 1 and the 8 layers, got 9"):
        snn(9, features=48, depth=7)
