"""A self-normalizing MLP (arXiv 1706.02515): deep, without normalization or shortcuts."""

import torch
from torch import nn

from .building import cut_evenly, seeded


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
