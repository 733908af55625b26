"""A transformer like GPT-2: pre-norm, causal, learned positions, untied head."""

import torch
from torch import Tensor, nn

from .building import cut_evenly, parts_of, seeded

_HEAD_WIDTH = 32
_STD = 0.02


class TokenEmbedding(nn.Module):
    """The sum of a vector per token and one per position: the first layer of :func:`gpt`."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 ``(batch, length)`` to float ``(batch, length, width)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.add(self.token(tokens), self.position(positions))


class TransformerBlock(nn.Module):
    """``x + attention(LayerNorm(x))``, then ``x + MLP(LayerNorm(x))``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, width)`` to the same shape; no position sees a later one."""
        x = x + self.project(self._attend(self.attention_norm(x)))
        return torch.add(x, self.mlp(self.mlp_norm(x)))

    def _attend(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


def gpt(
    stages: int,
    *,
    vocabulary: int,
    context: int,
    width: int = 128,
    depth: int = 6,
    seed: int = 0,
) -> list[nn.Module]:
    """Return the model in ``stages`` modules: int64 tokens to logits of the next token.

    It can be cut between its layers: the embedding, every block, and the head. Weights are drawn as
    in GPT-2: a normal distribution of standard deviation 0.02, less for layers that add to the
    residual.
    """
    heads = max(1, width // _HEAD_WIDTH)
    if width % heads:
        raise ValueError(f"width must be a multiple of the {heads} heads, got {width}")
    with seeded(seed):
        blocks = [TransformerBlock(width, heads) for _ in range(depth)]
        layers = [
            TokenEmbedding(vocabulary, context, width),
            *blocks,
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)),
        ]
        for module in parts_of(layers):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, _STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in blocks:
            for added in (block.project, block.mlp[2]):
                assert isinstance(added, nn.Linear)
                nn.init.normal_(added.weight, 0.0, _STD / (2 * depth) ** 0.5)
    return cut_evenly(layers, stages)
