"""Tests the models: functions of their seed, cut anywhere, as defined or as published."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from studies.models.building import cut_evenly
from studies.models.mlp import residual_mlp, snn
from studies.models.text import Subspace, TransformerBlock, gpt, residual_lstm, speedrun
from studies.models.vision import inception_v4, resnet, vgg


class Model(NamedTuple):
    build: Callable[..., list[nn.Module]]
    arguments: dict[str, int]
    layers: int
    shape: tuple[int, ...]  # of an input
    outputs: tuple[int, ...]  # (batch, length, 11): of tokens below 11

    def make(self, stages: int, seed: int = 3, **changed: int) -> list[nn.Module]:
        return self.build(stages, **{**self.arguments, **changed}, seed=seed)

    def value(self, batch: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if self.outputs[-1] == 11:
            return torch.randint(11, (batch, *self.shape[1:]), generator=generator)
        return torch.randn(batch, *self.shape[1:], generator=generator)

    def begun(self, stages: int, **changed: int) -> nn.Sequential:
        """Return the model with other weights where outputs of blocks and heads begin at 0."""
        whole = nn.Sequential(*self.make(stages, **changed))
        for p in whole.parameters() if self.build is speedrun else ():
            nn.init.normal_(p, std=0.3)
        return whole


IMAGES, TOKENS = (2, 3, 32, 32), (2, 7)
SMALL = {"vocabulary": 11, "width": 8, "depth": 3}
TEXT = {
    "gpt": Model(gpt, {**SMALL, "context": 7}, 5, TOKENS, (2, 7, 11)),
    "lstm": Model(residual_lstm, SMALL, 5, TOKENS, (2, 7, 11)),
    "speedrun": Model(speedrun, SMALL, 3, TOKENS, (2, 7, 11)),
    "subspace": Model(speedrun, {**SMALL, "rank": 6}, 3, TOKENS, (2, 7, 11)),
}
MODELS = {
    "residual-mlp": Model(residual_mlp, {}, 8, (2, 64), (2, 10)),
    "snn": Model(snn, {"features": 48, "width": 16, "depth": 7}, 8, (2, 3, 4, 4), (2, 10)),
    "vgg": Model(vgg, {"depth": 11, "width": 4}, 11, IMAGES, (2, 10)),
    "resnet": Model(resnet, {"width": 4}, 10, IMAGES, (2, 10)),
    "bottleneck": Model(resnet, {"depth": 50, "width": 2}, 18, IMAGES, (2, 10)),
    "inception": Model(inception_v4, {"width": 1}, 21, IMAGES, (2, 10)),
    **TEXT,
}


def weights(stages: list[nn.Module]) -> Tensor:
    return nn.utils.parameters_to_vector(nn.Sequential(*stages).parameters()).detach()


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_and_neither_the_cut_nor_the_global_state_does(name: str) -> None:
    """And every parameter gets a gradient."""
    if name == "inception":
        pytest.importorskip("pytorchcv")
    model = MODELS[name]
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
    begun = model.begun(2)
    begun(model.value(4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in begun.parameters())


def test_stages_keep_the_order_and_differ_by_one_layer_at_most() -> None:
    modules = [nn.Identity() for _ in range(11)]
    for stages in range(1, 12):
        groups = [
            [m for m in stage.modules() if m in modules] for stage in cut_evenly(modules, stages)
        ]
        assert [layer for group in groups for layer in group] == modules
        assert len(groups) == stages
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


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


# Language models


@pytest.mark.parametrize("model", TEXT.values(), ids=TEXT)
def test_no_position_sees_a_later_one(model: Model) -> None:
    """Every later position sees an earlier one; an untrained model guesses uniformly."""
    whole, tokens = model.begun(2, width=32), model.value()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = whole(tokens), whole(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert ((after[:, 4:] - before[:, 4:]).abs().amax(dim=(0, 2)) > 1e-6).all()
    logits = nn.Sequential(*model.make(3))(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(torch.tensor(11.0).log().item(), abs=0.4)


def test_a_transformer_block_is_pre_norm_attention_and_mlp() -> None:
    block = TransformerBlock(8, heads=2)
    x = torch.randn(3, 5, 8)
    query, key, value = block.query_key_value(block.attention_norm(x)).chunk(3, dim=-1)
    mixed = torch.empty(3, 5, 8)
    for head in (slice(0, 4), slice(4, 8)):
        for row in range(5):
            scores = query[:, row : row + 1, head] @ key[:, : row + 1, head].mT / 4**0.5
            mixed[:, row, head] = (scores.softmax(-1) @ value[:, : row + 1, head]).squeeze(1)
    y = x + block.project(mixed)
    torch.testing.assert_close(block(x), y + block.mlp(block.mlp_norm(y)))


@pytest.mark.parametrize("name", ["gpt", "speedrun"])
def test_heads_must_divide_the_width(name: str) -> None:
    with pytest.raises(ValueError, match="width must be a multiple of the 3 heads, got 97"):
        TEXT[name].make(2, width=97)
    assert len(TEXT[name].make(2, width=96)) == 2  # one head per 32


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_the_backward_meets_weights_that_were_written_after_the_forward(name: str) -> None:
    """Methods that change weights between the two, as kernels do, rely on this.

    A block's input gradient must be that of the new weights with the old activations: other weights
    must change the gradient, and restoring the old ones in time must restore it.
    """
    block = TEXT[name].make(5)[1]
    x = torch.randn(2, 7, 8, requires_grad=True)
    kept = [p.detach().clone() for p in block.parameters()]

    def gradient(*factors: float) -> torch.Tensor:
        output = block(x)
        for factor in factors:
            for p, value in zip(block.parameters(), kept, strict=True):
                p.data.copy_(factor * value)
        (found,) = torch.autograd.grad(output.square().sum(), x)
        for p, value in zip(block.parameters(), kept, strict=True):
            p.data.copy_(value)
        return found

    unchanged = gradient()
    assert torch.equal(gradient(2.0, 1.0), unchanged)
    assert not torch.allclose(gradient(2.0), unchanged, rtol=1e-2)


def test_edges_of_a_subspace_carry_coordinates_and_tokens() -> None:
    tokens = TEXT["subspace"].value()
    for rank, columns in ((None, 32), (6, 7)):
        edge = speedrun(3, vocabulary=11, width=32, depth=3, rank=rank)[0](tokens)
        assert edge.shape == (2, 7, columns)
    assert torch.equal(edge[..., -1].long(), tokens)
    subspace = Subspace(11, 32, 6)
    x = torch.randn(2, 7, 6) @ subspace.columns.T + subspace.fixed[tokens]
    back, carried = subspace.decode(subspace.encode(x, tokens))
    torch.testing.assert_close(back, x)  # nothing of what lies in it is lost
    assert torch.equal(carried, tokens)


# Models of images


# parameters of torchvision's models with 1,000 classes, from its documentation
SIZES = {
    ("vgg", 16): 138_365_992,
    ("vgg", 19): 143_678_248,
    ("resnet", 18): 11_689_512,
    ("resnet", 34): 21_797_672,
    ("resnet", 50): 25_557_032,
    ("resnet", 101): 44_549_160,
    ("resnet", 152): 60_192_808,
}
# without the 7x7 convolution of the stem, and without 48 of 49 positions before the head
SMALLER = {"vgg": 48 * 512 * 4096, "resnet": 64 * 3 * (7 * 7 - 3 * 3)}


@pytest.mark.parametrize(("name", "depth"), list(SIZES), ids=lambda value: str(value).lower())
def test_width_64_has_the_published_number_of_parameters(name: str, depth: int) -> None:
    with torch.device("meta"):
        stages = (resnet if name == "resnet" else vgg)(3, depth=depth, classes=1000)
    count = sum(p.numel() for stage in stages for p in stage.parameters())
    assert count == SIZES[name, depth] - SMALLER[name]


def test_small_images_keep_their_resolution_and_have_the_papers_depths() -> None:
    """For CIFAR-10: 6n + 2 layers, 0.27 million parameters at 20, 1.7 million at 110."""
    for depth, blocks, millions in ((8, 3, 0.08), (20, 9, 0.27), (110, 54, 1.73)):
        stages = resnet(blocks + 2, depth=depth, width=16)
        count = sum(p.numel() for stage in stages for p in stage.parameters())
        assert count / 1e6 == pytest.approx(millions, abs=0.005)
    assert stages[0](torch.randn(1, 3, 32, 32)).shape == (1, 16, 32, 32)
    with pytest.raises(ValueError, match=r"or 6n \+ 2, got 21"):
        resnet(2, depth=21)
    with pytest.raises(ValueError, match=r"depth of VGG must be one of 1\d, .* got 17"):
        vgg(2, depth=17)


def test_width_32_of_inception_is_the_librarys_own() -> None:
    library = pytest.importorskip("pytorchcv.models.inceptionv4")
    with torch.device("meta"):
        theirs = library.inceptionv4(num_classes=10)
    ours = nn.Sequential(*inception_v4(4, width=32)).eval()
    weights = theirs.state_dict()
    shapes = [tuple(value.shape) for value in ours.state_dict().values()]
    assert shapes == [tuple(value.shape) for value in weights.values()]
    published = 42_679_816 - 990 * (1536 + 1)  # 1,000 classes, less the head of 990
    assert sum(p.numel() for stage in ours for p in stage.parameters()) == published
    theirs.to_empty(device="cpu").eval()
    theirs.load_state_dict(dict(zip(weights, ours.state_dict().values(), strict=True)))
    theirs.features.final_pool = nn.AvgPool2d(1)  # 75 pixels leave one position
    images = torch.randn(1, 3, 75, 75)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))
