"""MLPs: a residual one, and a self-normalizing one (arXiv 1706.02515)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .building import cut_evenly, seeded

_DROPOUT = 0.05


class ResidualBlock(nn.Module):
    """``x + W2 relu(W1 LayerNorm(x))`` on ``(batch, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.expand(self.norm(x)))
        return torch.add(x, self.project(hidden))


def residual_mlp(
    stages: int,
    *,
    features: int = 64,
    width: int = 64,
    depth: int = 6,
    classes: int = 10,
    seed: int = 0,
) -> list[nn.Module]:
    """Return a Linear, ``depth`` residual blocks, and a norm with a Linear, in ``stages``."""
    with seeded(seed):
        layers: list[nn.Module] = [nn.Sequential(nn.Flatten(), nn.Linear(features, width))]
        layers += [ResidualBlock(width) for _ in range(depth)]
        layers.append(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes)))
    return cut_evenly(layers, stages)


def snn(
    stages: int,
    *,
    features: int,
    width: int = 256,
    depth: int = 7,
    classes: int = 10,
    seed: int = 0,
) -> list[nn.Module]:
    """Return the model in ``stages`` modules on samples of ``features`` values.

    Its layers are ``depth`` Linears, each with SELU and AlphaDropout, and the head. Weights are
    drawn as in the paper, normal with variance 1/inputs, and biases are 0: the outputs of every
    layer then keep the inputs' mean of 0 and variance of 1.
    """
    with seeded(seed):
        layers: list[nn.Module] = [nn.Sequential(nn.Flatten(), *_hidden(features, width))]
        layers += [nn.Sequential(*_hidden(width, width)) for _ in range(depth - 1)]
        layers.append(_linear(width, classes))
    return cut_evenly(layers, stages)


def _hidden(inputs: int, outputs: int) -> list[nn.Module]:
    return [_linear(inputs, outputs), nn.SELU(), nn.AlphaDropout(_DROPOUT)]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    with torch.no_grad():
        linear.weight.normal_(0.0, inputs**-0.5)
        linear.bias.zero_()
    return linear
