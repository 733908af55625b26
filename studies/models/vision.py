"""Models for images with any width: ResNet, VGG with BatchNorm, and Inception-v4.

arXiv 1512.03385, 1409.1556 and 1602.07261. Torchvision's own have only one width and work with
only one build of torch. These are for small images: ResNet without the reduction of its stem, VGG
with one position before its head. All their other parameters have at width 64 the shapes and the
order of torchvision's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, device, nn

from spectrain_ext.extras import require

from .building import cut_evenly, draw_convolutions, seeded

# ResNet

_BASIC = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4  # output channels of a bottleneck per channel inside


class Block(nn.Module):
    """A residual block of convolutions; its stride reduces height and width."""

    def __init__(self, channels: int, convolutions: list[tuple[int, int, int]]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs, stride = channels, 1
        for outputs, size, its_stride in convolutions:
            layers += [*_normalized(inputs, outputs, size, its_stride), nn.ReLU(inplace=True)]
            inputs, stride = outputs, stride * its_stride
        self.body = nn.Sequential(*layers[:-1])
        same = stride == 1 and channels == inputs
        # a convolution on the shortcut if the block changes the shape
        self.shortcut = None if same else nn.Sequential(*_normalized(channels, inputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        joined: Tensor = self.relu(y + (x if self.shortcut is None else self.shortcut(x)))
        return joined


def resnet(
    stages: int,
    *,
    depth: int = 18,
    width: int = 64,
    classes: int = 10,
    seed: int = 0,
) -> list[nn.Module]:
    """Return ResNet in ``stages`` modules: the stem, every block, and the head are its layers."""
    depths: dict[int, tuple[int, ...]] = {**_BASIC, **_BOTTLENECK}
    if depth not in depths and depth > 2 and depth % 6 == 2:
        depths[depth] = (depth // 6,) * 3
    if depth not in depths:
        known = ", ".join(map(str, depths))
        raise ValueError(f"depth of ResNet must be one of {known}, or 6n + 2, got {depth}")
    with seeded(seed):
        layers: list[nn.Module] = [
            nn.Sequential(*_normalized(3, width, 3, 1), nn.ReLU(inplace=True))
        ]
        channels = width
        for group, count in enumerate(depths[depth]):
            inside = width * 2**group
            for position in range(count):
                stride = 2 if group and not position else 1
                if depth not in _BOTTLENECK:
                    convolutions = [(inside, 3, stride), (inside, 3, 1)]
                else:
                    convolutions = [
                        (inside, 1, 1),
                        (inside, 3, stride),
                        (_EXPANSION * inside, 1, 1),
                    ]
                layers.append(Block(channels, convolutions))
                channels = convolutions[-1][0]
        layers.append(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        )
        draw_convolutions(layers)
    return cut_evenly(layers, stages)


def _normalized(channels: int, width: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(width)


# VGG

# Convolutions in each of the five groups, and their width as a multiple of the first group's.
_GROUPS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_MULTIPLES = (1, 2, 4, 8, 8)
_HIDDEN = 64  # units of the head per unit of width; 4,096 in the original


def vgg(
    stages: int, *, depth: int = 16, width: int = 64, classes: int = 10, seed: int = 0
) -> list[nn.Module]:
    """Return VGG in ``stages`` modules; ``depth`` layers have a convolution or a Linear each."""
    if depth not in _GROUPS:
        raise ValueError(f"depth of VGG must be one of {', '.join(map(str, _GROUPS))}, got {depth}")
    with seeded(seed):
        layers = _convolutions(depth, width)
        draw_convolutions(layers)
        layers += _head(width, classes)
    return cut_evenly(layers, stages)


def _convolutions(depth: int, width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for count, multiple in zip(_GROUPS[depth], _MULTIPLES, strict=True):
        for position in range(count):
            layer: list[nn.Module] = [nn.Conv2d(channels, multiple * width, 3, padding=1)]
            channels = multiple * width
            layer += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if position == count - 1:
                layer.append(nn.MaxPool2d(2))
            layers.append(nn.Sequential(*layer))
    return layers


def _head(width: int, classes: int) -> list[nn.Module]:
    hidden = _HIDDEN * width
    # 0.01 in the original. Fewer inputs, or one position instead of 49 copies, get larger weights,
    # which keeps the sums as large as in the original: narrow models would otherwise not begin to
    # learn.
    deviation = 0.01 * (64 / width) ** 0.5
    linears = [
        _linear(8 * width, hidden, deviation * 7),
        _linear(hidden, hidden, deviation),
        _linear(hidden, classes, deviation),
    ]
    return [
        nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            linears[0],
            nn.ReLU(inplace=True),
            nn.Dropout(),
        ),
        nn.Sequential(linears[1], nn.ReLU(inplace=True), nn.Dropout()),
        linears[2],
    ]


def _linear(inputs: int, outputs: int, deviation: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, 0.0, deviation)
    nn.init.zeros_(linear.bias)
    return linear


# Inception-v4

_WIDTH = 32  # channels of the original's first convolution; all others are multiples
_PIXELS = 75  # the smallest images that its reductions allow


def inception_v4(
    stages: int, *, width: int = 32, classes: int = 10, seed: int = 0
) -> list[nn.Module]:
    """Return Inception-v4 in ``stages`` modules.

    Its layers are the stem's convolutions, its three branched blocks, the sixteen units, and the
    head. With width 32 it has the parameters of pytorchcv's in the same order.
    """
    library = require(
        "pytorchcv.models.inceptionv4", "Inception-v4 comes with pytorchcv", "pip install pytorchcv"
    )
    with device("meta"):  # only the shapes are needed
        whole = library.inceptionv4(num_classes=classes)
    with seeded(seed):
        _rebuild(whole, width)
    stem, *groups, _ = whole.features
    begin = [nn.Upsample((_PIXELS, _PIXELS), mode="bilinear"), stem.conv1, stem.conv2, stem.conv3]
    layers = [nn.Sequential(*begin), stem.block1, stem.block2, stem.block3]
    layers += [unit for group in groups for unit in group]
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *whole.output))
    return cut_evenly(layers, stages)


def _rebuild(module: nn.Module, width: int) -> None:
    """Replace every module with weights by one with channels in proportion to the width."""
    for name, part in module.named_children():
        if isinstance(part, nn.Conv2d):
            inputs = part.in_channels if part.in_channels == 3 else _scaled(part.in_channels, width)
            outputs = _scaled(part.out_channels, width)
            alike: dict[str, Any] = {
                key: getattr(part, key) for key in ("kernel_size", "stride", "padding")
            }
            new = nn.Conv2d(inputs, outputs, **alike, bias=part.bias is not None)
            setattr(module, name, new)
        elif isinstance(part, nn.BatchNorm2d):
            setattr(module, name, nn.BatchNorm2d(_scaled(part.num_features, width), eps=part.eps))
        elif isinstance(part, nn.Linear):
            scaled = _scaled(part.in_features, width)
            setattr(module, name, nn.Linear(scaled, part.out_features))
        else:
            _rebuild(part, width)


def _scaled(channels: int, width: int) -> int:
    return channels // _WIDTH * width
