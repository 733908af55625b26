"""VGG (arXiv 1409.1556) with batch normalization, in torchvision's architecture.

Torchvision's own has only one width and works with only one build of torch. Width 64 has the
parameters of ``torchvision.models.vgg16_bn`` in the same order, so that its weights fit.
"""

from torch import nn

from .building import cut_evenly, draw_convolutions, seeded

# Convolutions in each of the five groups, and their width as a multiple of the first group's.
_GROUPS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_MULTIPLES = (1, 2, 4, 8, 8)
_HIDDEN = 64  # units of the head per unit of width; 4,096 in the original


def vgg(
    stages: int,
    *,
    depth: int = 16,
    width: int = 64,
    classes: int = 10,
    pool: int = 7,
    seed: int = 0,
) -> list[nn.Module]:
    """Return VGG as a list of ``stages`` modules on images ``(batch, 3, height, width)``.

    It can be cut between its ``depth`` layers: each is a convolution or a Linear with the modules
    that follow it.
    """
    if depth not in _GROUPS:
        raise ValueError(f"depth of VGG must be one of {', '.join(map(str, _GROUPS))}, got {depth}")
    with seeded(seed):
        layers = _convolutions(depth, width)
        draw_convolutions(layers)
        layers += _head(width, pool, classes)
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


def _head(width: int, pool: int, classes: int) -> list[nn.Module]:
    hidden = _HIDDEN * width
    # 0.01 in the original. Fewer inputs, or one position instead of 49 copies, get larger weights,
    # which keeps the sums as large as in the original: narrow models would otherwise not begin to
    # learn.
    deviation = 0.01 * (64 / width) ** 0.5
    linears = [
        _linear(8 * width * pool**2, hidden, deviation * 7 / pool),
        _linear(hidden, hidden, deviation),
        _linear(hidden, classes, deviation),
    ]
    return [
        nn.Sequential(
            nn.AdaptiveAvgPool2d(pool),
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
