"""ResNet (arXiv 1512.03385) in torchvision's architecture, of any width.

Written out because torchvision has it in one width only, and works with one build of torch only.
Width 64 with the large stem has the parameters of ``torchvision.models.resnet18`` in their order,
so that its weights fit.
"""

from torch import Tensor, nn

from .partition import cut_evenly
from .seeding import seeded

_BASIC = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4  # output channels of a bottleneck per channel inside


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input passes; ``stride`` is the first one's."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3, 1)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, H, W)`` to ``(batch, width, H / stride, W / stride)``."""
        y = self.relu(self.bn1(self.conv1(x)))
        return _joined(self.relu, self.bn2(self.conv2(y)), x, self.downsample)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around which the input passes; ``stride`` is the second's."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, width, 1, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, _EXPANSION * width, 1, 1)
        self.bn3 = nn.BatchNorm2d(_EXPANSION * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, _EXPANSION * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, H, W)`` to ``(batch, 4 * width, H / stride, W / stride)``."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return _joined(self.relu, self.bn3(self.conv3(y)), x, self.downsample)


def resnet(
    stages: int,
    *,
    depth: int = 18,
    width: int = 64,
    channels: int = 3,
    classes: int = 10,
    small_images: bool = False,
    seed: int = 0,
) -> list[nn.Module]:
    """Return ResNet as a list of ``stages`` modules on images ``(batch, channels, height, width)``.

    Its layers, between which it can be cut, are the stem, every block, and the head.

    Args:
        stages: parts, at most the number of blocks and 2 (10 for a depth of 18).
        depth: 18 or 34 (basic blocks), 50, 101 or 152 (bottlenecks).
        width: channels of the first group; the original has 64.
        channels: of an image.
        classes: size of the output ``(batch, classes)``.
        small_images: begin with a 3x3 convolution instead of a 7x7 one of stride 2 and a pooling,
            as the paper does for images of 32 pixels.
        seed: decides the initial weights, which are torchvision's distributions.

    Raises:
        ValueError: another depth, or more stages than layers.
    """
    depths = {**_BASIC, **_BOTTLENECK}
    if depth not in depths:
        known = ", ".join(map(str, depths))
        raise ValueError(f"depth of ResNet must be one of {known}, got {depth}")
    basic = depth in _BASIC
    with seeded(seed):
        layers = [_stem(channels, width, small_images)]
        channels = width
        for group, count in enumerate(depths[depth]):
            inside = width * 2**group
            for position in range(count):
                stride = 2 if group and not position else 1
                block = BasicBlock if basic else Bottleneck
                layers.append(block(channels, inside, stride))
                channels = inside if basic else _EXPANSION * inside
        layers.append(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        )
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return cut_evenly(layers, stages)


def _stem(channels: int, width: int, small_images: bool) -> nn.Module:
    if small_images:
        return nn.Sequential(
            _convolution(channels, width, 3, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
    return nn.Sequential(
        _convolution(channels, width, 7, 2),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def _convolution(channels: int, width: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, width, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(channels: int, width: int, stride: int) -> nn.Module | None:
    """The input's own convolution where the block changes the shape."""
    if stride == 1 and channels == width:
        return None
    return nn.Sequential(_convolution(channels, width, 1, stride), nn.BatchNorm2d(width))


def _joined(relu: nn.Module, y: Tensor, x: Tensor, shortcut: nn.Module | None) -> Tensor:
    joined: Tensor = relu(y + (x if shortcut is None else shortcut(x)))
    return joined
