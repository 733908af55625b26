"""A self-normalizing MLP (arXiv 1706.02515): deep without normalization and without shortcuts."""

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
    """Return the model as a list of ``stages`` modules on ``(batch, ...)`` of so many features.

    Its layers, between which it can be cut, are ``depth`` Linears, each with SELU and AlphaDropout,
    and the head. Weights are drawn as the paper has them, normal with variance 1/inputs, biases 0:
    with these the outputs of every layer keep the inputs' mean of 0 and variance of 1.

    Args:
        stages: parts, at most ``depth + 1``.
        features: of a sample.
        width: of every hidden layer.
        depth: number of hidden layers.
        classes: size of the output ``(batch, classes)``.
        dropout: share of values that AlphaDropout sets to SELU's limit in training.
        seed: decides the initial weights.

    Raises:
        ValueError: more stages than layers.
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
