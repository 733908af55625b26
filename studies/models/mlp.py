"""MLPs: a residual one, and a self-normalizing one (arXiv 1706.02515)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .building import cut_evenly, seeded

_BLOCKS = 6


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
    depth: int | None = None,
    classes: int = 10,
    seed: int = 0,
) -> list[nn.Module]:
    """Return the model in ``stages`` modules.

    Its layers are a Linear, ``depth`` residual blocks (by default six, and one more for each stage
    beyond eight), and a LayerNorm with a Linear. The weights do not depend on the cut.
    """
    if stages < 1:
        raise ValueError(f"stages must be at least 1, got {stages}")
    blocks = max(_BLOCKS, stages - 2) if depth is None else depth
    with seeded(seed):
        layers: list[nn.Module] = [nn.Linear(features, width)]
        layers += [ResidualBlock(width) for _ in range(blocks)]
        layers.append(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes)))
    return cut_evenly(layers, stages)


def snn(
    stages: int,
    *,
    features: int,
    width: int = 256,
    depth: int = 7,
    classes: int = 10,
    dropout: float = 0.05,
    seed: int = 0,
) -> list[nn.Module]:
    """Return the model as a list of ``stages`` modules on samples of ``features`` values.

    It can be cut between its layers: ``depth`` Linears, each with SELU and AlphaDropout, and the
    head. Weights are drawn as in the paper, normal with variance 1/inputs, and biases are 0: the
    outputs of every layer then keep the inputs' mean of 0 and variance of 1.
    """
    with seeded(seed):
        layers: list[nn.Module] = [nn.Sequential(nn.Flatten(), *_hidden(features, width, dropout))]
        layers += [nn.Sequential(*_hidden(width, width, dropout)) for _ in range(depth - 1)]
        layers.append(_linear(width, classes))
    return cut_evenly(layers, stages)


def _hidden(inputs: int, outputs: int, dropout: float) -> list[nn.Module]:
    return [_linear(inputs, outputs), nn.SELU(), nn.AlphaDropout(dropout)]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    with torch.no_grad():
        linear.weight.normal_(0.0, inputs**-0.5)
        linear.bias.zero_()
    return linear
