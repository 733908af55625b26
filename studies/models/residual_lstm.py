"""A deep residual LSTM for text."""

import torch
from torch import Tensor, nn

from .building import cut_evenly, seeded


class LSTMBlock(nn.Module):
    """``x + LSTM(LayerNorm(x))``, with an initial state of zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        # cuDNN keeps a copy of the weights for the backward, which would then ignore the weights
        # that a method sets for it.
        with torch.backends.cudnn.flags(enabled=False):
            return torch.add(x, self.lstm(self.norm(x))[0])


def residual_lstm(
    stages: int, *, vocabulary: int, width: int = 128, depth: int = 4, seed: int = 0
) -> list[nn.Module]:
    """Return the model in ``stages`` modules: int64 tokens to logits of the next token.

    It can be cut between its layers: an embedding, ``depth`` LSTM blocks, and a LayerNorm with a
    Linear. The initial weights are torch's defaults, except for smaller embedding weights.
    """
    with seeded(seed):
        embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(embedding.weight, 0.0, 0.1)
        layers: list[nn.Module] = [embedding]
        layers += [LSTMBlock(width) for _ in range(depth)]
        layers.append(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary)))
    return cut_evenly(layers, stages)
