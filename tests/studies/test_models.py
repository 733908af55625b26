"""Tests every model: a function of its seed, cut anywhere; the MLPs; how layers are divided."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from studies.models.building import cut_evenly
from studies.models.mlp import ResidualBlock, residual_mlp, snn
from studies.models.text import gpt, residual_lstm, speedrun
from studies.models.vision import inception_v4, resnet, vgg

LIBRARY = pytest.mark.skipif(find_spec("pytorchcv") is None, reason="needs the extra 'inception'")


class Model(NamedTuple):
    build: Callable[..., list[nn.Module]]
    arguments: dict[str, int]
    layers: int
    shape: tuple[int, ...]  # of an input; (batch, length): tokens below 11
    outputs: tuple[int, ...]

    def make(self, stages: int, seed: int = 3) -> list[nn.Module]:
        return self.build(stages, **self.arguments, seed=seed)

    def value(self, batch: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if len(self.shape) == 2 and self.outputs[-1] == 11:
            return torch.randint(11, (batch, *self.shape[1:]), generator=generator)
        return torch.randn(batch, *self.shape[1:], generator=generator)


IMAGES, TOKENS = (2, 3, 32, 32), (2, 7)
TEXT = {"vocabulary": 11, "width": 8, "depth": 3}
MODELS = {
    "residual-mlp": Model(residual_mlp, {}, 8, (2, 64), (2, 10)),
    "snn": Model(snn, {"features": 48, "width": 16, "depth": 7}, 8, (2, 3, 4, 4), (2, 10)),
    "vgg": Model(vgg, {"depth": 11, "width": 4}, 11, IMAGES, (2, 10)),
    "resnet": Model(resnet, {"width": 4}, 10, IMAGES, (2, 10)),
    "bottleneck": Model(resnet, {"depth": 50, "width": 2}, 18, IMAGES, (2, 10)),
    "inception": Model(inception_v4, {"width": 1}, 21, IMAGES, (2, 10)),
    "gpt": Model(gpt, {**TEXT, "context": 7}, 5, TOKENS, (2, 7, 11)),
    "lstm": Model(residual_lstm, TEXT, 5, TOKENS, (2, 7, 11)),
    "speedrun": Model(speedrun, TEXT, 3, TOKENS, (2, 7, 11)),
    "subspace": Model(speedrun, {**TEXT, "rank": 6}, 3, TOKENS, (2, 7, 11)),
}
EACH = pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=name, marks=[LIBRARY] * (name == "inception"))
        for name, model in MODELS.items()
    ],
)


def weights(stages: list[nn.Module]) -> Tensor:
    return nn.utils.parameters_to_vector(nn.Sequential(*stages).parameters()).detach()


@EACH
def test_the_seed_decides_and_neither_the_cut_nor_the_global_state_does(model: Model) -> None:
    state = torch.random.get_rng_state()
    whole = model.make(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():
        expected = whole[0].eval()(model.value())
    assert expected.shape == model.outputs
    for stages in (2, 3, model.layers):
        torch.manual_seed(stages)
        cut = model.make(stages)
        assert len(cut) == stages
        assert all(list(stage.parameters()) for stage in cut)
        assert torch.equal(weights(cut), weights(whole))
        with torch.no_grad():
            assert torch.equal(nn.Sequential(*cut).eval()(model.value()), expected)
    assert not torch.equal(weights(model.make(1, seed=4)), weights(whole))
    with pytest.raises(ValueError, match=f"between 1 and the {model.layers} layers, got"):
        model.make(model.layers + 1)


@EACH
def test_every_parameter_gets_a_gradient(model: Model) -> None:
    whole = nn.Sequential(*model.make(2))
    if model.build is speedrun:  # outputs of its blocks and of its head begin at 0
        for p in whole.parameters():
            nn.init.normal_(p, std=0.3)
    whole(model.value(4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in whole.parameters())


# The MLPs


def test_eight_stages_are_linear_six_blocks_and_head() -> None:
    first, *blocks, last = residual_mlp(8)
    assert [type(layer) for layer in first.children()] == [nn.Flatten, nn.Linear]
    assert [type(block) for block in blocks] == [ResidualBlock] * 6
    assert [type(layer) for layer in last.children()] == [nn.LayerNorm, nn.Linear]
    assert [p.shape for m in (first, last) for p in m.parameters() if p.dim() == 2] == [
        (64, 64),
        (10, 64),
    ]


def test_a_block_adds_to_its_input() -> None:
    block, x = ResidualBlock(4), torch.randn(3, 4)
    expected = x + block.project(torch.relu(block.expand(block.norm(x))))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("training", [False, True], ids=["test", "dropout"])
def test_every_self_normalizing_layer_keeps_mean_zero_and_variance_one(training: bool) -> None:
    torch.manual_seed(0)
    layers = snn(17, features=3072, width=256, depth=16)
    values = torch.randn(512, 3, 32, 32)
    for layer in layers[:-1]:
        with torch.no_grad():
            values = layer.train(training)(values)
        assert values.mean().item() == pytest.approx(0.0, abs=0.1)
        assert values.var().item() == pytest.approx(1.0, abs=0.15)


# How layers are divided


@pytest.mark.parametrize("layers", [1, 2, 7, 11])
def test_stages_keep_the_order_and_differ_by_one_layer_at_most(layers: int) -> None:
    modules = [nn.Identity() for _ in range(layers)]
    for stages in range(1, layers + 1):
        groups = [
            [m for m in stage.modules() if m in modules] for stage in cut_evenly(modules, stages)
        ]
        assert [layer for group in groups for layer in group] == modules
        assert len(groups) == stages
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
    for stages in (-1, 0, layers + 1):
        with pytest.raises(ValueError, match=f"between 1 and the {layers} layers, got {stages}"):
            cut_evenly(modules, stages)
