"""Tests VGG, ResNet and Inception-v4: the published architectures, at any width."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from studies.models.vision import inception_v4, resnet, vgg

Build = Callable[..., list[nn.Module]]

LIBRARY = pytest.mark.skipif(find_spec("pytorchcv") is None, reason="needs the extra 'inception'")

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


def _build(name: str, depth: int, stages: int) -> list[nn.Module]:
    build = resnet if name == "resnet" else vgg
    return build(stages, depth=depth, classes=1000)


@pytest.mark.parametrize(("name", "depth"), list(SIZES), ids=lambda value: str(value).lower())
def test_width_64_has_the_published_number_of_parameters(name: str, depth: int) -> None:
    with torch.device("meta"):
        stages = _build(name, depth, 3)
    count = sum(p.numel() for stage in stages for p in stage.parameters())
    assert count == SIZES[name, depth] - SMALLER[name]


@pytest.mark.parametrize(
    ("name", "depth", "stages"),
    [("vgg", 11, 3), ("vgg", 16, 16), ("resnet", 18, 10), ("resnet", 50, 4)],
    ids=["vgg11", "vgg16", "resnet18", "resnet50"],
)
def test_torchvisions_weights_give_torchvisions_outputs(name: str, depth: int, stages: int) -> None:
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    theirs = getattr(models, f"{name}{depth}{'_bn' if name == 'vgg' else ''}")().eval()
    if name == "resnet":
        theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    else:
        theirs.avgpool, theirs.classifier[0] = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 4096)
    ours = nn.Sequential(*_build(name, depth, stages)).eval()
    weights = theirs.state_dict()
    assert len(weights) == len(ours.state_dict())
    ours.load_state_dict(dict(zip(ours.state_dict(), weights.values(), strict=True)))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize("width", [4, 16])
def test_the_head_of_vgg_passes_on_what_the_originals_does(width: int) -> None:
    """A standard deviation of 0.01 would leave almost nothing of a narrow model's signal."""
    torch.manual_seed(0)
    features = torch.randn(256, 8 * width, 1, 1).relu()
    head = nn.Sequential(*vgg(16, width=width)[13:]).eval()
    # the original's: fan-ins of 25,088 (49 copies of 512), 4,096 and 4,096
    gain = 512**0.5 * 49 * 0.01 / 7 * (4096**0.5 * 0.01) ** 2 / 2**1.5
    assert head(features).std().item() == pytest.approx(gain, rel=0.5)


def test_small_images_keep_their_resolution_and_have_the_papers_depths() -> None:
    """For CIFAR-10: 6n + 2 layers, 0.27 million parameters at 20, 1.7 million at 110."""
    for depth, blocks, millions in ((8, 3, 0.08), (20, 9, 0.27), (110, 54, 1.73)):
        stages = resnet(blocks + 2, depth=depth, width=16)
        count = sum(p.numel() for stage in stages for p in stage.parameters())
        assert count / 1e6 == pytest.approx(millions, abs=0.005)
    assert stages[0](torch.randn(1, 3, 32, 32)).shape == (1, 16, 32, 32)
    with pytest.raises(ValueError, match=r"or 6n \+ 2, got 21"):
        resnet(2, depth=21)


@pytest.mark.parametrize("build", [vgg, resnet])
def test_another_depth_is_an_error(build: Build) -> None:
    with pytest.raises(ValueError, match=r"depth of \w+ must be one of 1\d, .* got 17"):
        build(2, depth=17)


@LIBRARY
def test_width_32_of_inception_is_the_librarys_own() -> None:
    from pytorchcv.models.inceptionv4 import inceptionv4

    with torch.device("meta"):
        theirs = inceptionv4(num_classes=10)
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


@LIBRARY
def test_all_of_inception_is_narrowed_alike() -> None:
    full = [p.shape for m in inception_v4(4, width=32) for p in m.parameters() if p.dim() == 4]
    narrow = [p.shape for m in inception_v4(4, width=4) for p in m.parameters() if p.dim() == 4]
    assert len(full) == len(narrow) == 149
    for wide, thin in zip(full, narrow, strict=True):
        assert thin == (wide[0] // 8, wide[1] if wide[1] == 3 else wide[1] // 8, *wide[2:])
