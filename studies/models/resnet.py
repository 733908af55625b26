"""ResNet (arXiv 1512.03385) in torchvision's architecture, with any width.

Torchvision's own has only one width and works with only one build of torch. Width 64 with the large
stem has the parameters of ``torchvision.models.resnet18`` in the same order, so that its weights
fit.
"""

from torch import Tensor, nn

from .building import cut_evenly, draw_convolutions, seeded

_BASIC = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4  # output channels of a bottleneck per channel inside


class Block(nn.Module):
    """A residual block of convolutions.

    Maps ``(batch, channels, H, W)`` to the last convolution's channels; its stride reduces height
    and width.
    """

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
    small_images: bool = False,
    seed: int = 0,
) -> list[nn.Module]:
    """Return ResNet as a list of ``stages`` modules on images ``(batch, 3, height, width)``.

    It can be cut between its layers: the stem, every block, and the head.
    """
    depths: dict[int, tuple[int, ...]] = {**_BASIC, **_BOTTLENECK}
    if small_images and depth not in depths and depth > 2 and depth % 6 == 2:
        depths[depth] = (depth // 6,) * 3
    if depth not in depths:
        known = ", ".join(map(str, depths))
        raise ValueError(
            f"depth of ResNet must be one of {known}{', or 6n + 2' * small_images}, got {depth}"
        )
    with seeded(seed):
        layers = [_stem(width, small_images)]
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


def _stem(width: int, small_images: bool) -> nn.Module:
    if small_images:
        return nn.Sequential(*_normalized(3, width, 3, 1), nn.ReLU(inplace=True))
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(*_normalized(3, width, 7, 2), nn.ReLU(inplace=True), pool)


def _normalized(channels: int, width: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(width)
