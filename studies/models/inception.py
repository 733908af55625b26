"""Builds Inception-v4 (arXiv 1602.07261) from pytorchcv with any width."""

from typing import Any

from torch import device, nn

from spectrain_ext.extras import require

from .building import cut_evenly, seeded

_WIDTH = 32  # channels of the original's first convolution; all others are multiples


def inception_v4(
    stages: int, *, width: int = 32, classes: int = 10, pixels: int = 75, seed: int = 0
) -> list[nn.Module]:
    """Return Inception-v4 as a list of ``stages`` modules on images ``(batch, 3, height, width)``.

    It can be cut between its 21 layers: the stem's convolutions, its three branched blocks, the
    sixteen units, and the head. With width 32 it has the parameters of pytorchcv's ``inceptionv4``
    in the same order, so that its weights fit; other widths scale all channels. The head averages
    over the units' output, 8 by 8 in the original.
    """
    if pixels < 75:
        raise ValueError(f"pixels of Inception-v4 must be at least 75, got {pixels}")
    library = require(
        "pytorchcv.models.inceptionv4", "Inception-v4 comes with pytorchcv", "pip install pytorchcv"
    )
    with device("meta"):  # only the shapes are needed
        whole = library.inceptionv4(num_classes=classes)
    with seeded(seed):
        _rebuild(whole, width)
    stem, *groups, _ = whole.features
    begin = [nn.Upsample((pixels, pixels), mode="bilinear"), stem.conv1, stem.conv2, stem.conv3]
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
