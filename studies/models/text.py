"""Language models: a transformer like GPT-2, one of the slow-link benchmark, a residual LSTM.

The baselines of Protocol NanoGPT (github.com/PluralisResearch/ProtocolNanoGPT, 2026) have RMS
norms, rotary positions on half of a head, normalized queries and keys, squared ReLU, outputs of
blocks and of the head that begin at 0, and capped logits: ``speedrun``. The subspace of its edges
is that of arXiv 2506.01260 in its reparametrized form: blocks add only within the span of fixed
orthonormal columns around a fixed embedding of the tokens, so that only coordinates and tokens
cross an edge.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.query_key_value = nn.Linear(width, 3 * width, bias)
        self.project = nn.Linear(width, width, bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width, bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, width)`` to the same shape; no position sees a later one."""
        projected = self.query_key_value(self.attention_norm(x))
        x = x + self.project(_attended(projected, self.heads))
        return torch.add(x, self.mlp(self.mlp_norm(x)))


def _attended(projected: Tensor, heads: int, rotates: bool = False) -> Tensor:
    """Return causal attention of queries, keys and values that lie beside each other."""
    parts = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind()
    if rotates:
        query, key = (_rotated(F.rms_norm(t, t.shape[-1:])) for t in (query, key))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


def _heads_of(width: int) -> int:
    heads = max(1, width // _HEAD_WIDTH)
    if width % heads:
        raise ValueError(f"width must be a multiple of the {heads} heads, got {width}")
    return heads


def gpt(
    stages: int,
    *,
    vocabulary: int,
    context: int,
    width: int = 128,
    depth: int = 6,
    seed: int = 0,
    bias: bool = True,
    tied: bool = False,
) -> list[nn.Module]:
    """Return the model in ``stages`` modules: int64 tokens to logits of the next token.

    Weights are drawn as in GPT-2, normal, with a smaller deviation for layers that add. If ``tied``
    the head has the weights of the token embedding.
    """
    heads = _heads_of(width)
    with seeded(seed):
        blocks = [TransformerBlock(width, heads, bias) for _ in range(depth)]
        embedding = TokenEmbedding(vocabulary, context, width)
        head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            head.weight = embedding.token.weight
        layers = [embedding, *blocks, nn.Sequential(nn.LayerNorm(width, bias=bias), head)]
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


# The slow-link benchmark's

_CAP = 15.0
_BASE = 1024.0  # base of the rotary frequencies


class Subspace(nn.Module):
    """Fixed columns ``(width, rank)`` and a fixed embedding ``(vocabulary, width)``.

    ``encode`` maps activations ``(..., width)`` and their tokens to coordinates followed by the
    token, ``(..., rank + 1)``; ``decode`` is its inverse for activations in the subspace.
    """

    columns: Tensor
    fixed: Tensor

    def __init__(self, vocabulary: int, width: int, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1337)  # the same on every stage
        drawn = torch.randn(width, rank, generator=generator)
        self.register_buffer("columns", torch.linalg.qr(drawn)[0].contiguous())
        self.register_buffer("fixed", torch.randn(vocabulary, width, generator=generator))

    def encode(self, x: Tensor, tokens: Tensor) -> Tensor:
        coordinates = (x - self.fixed[tokens]) @ self.columns
        return torch.cat([coordinates, tokens.unsqueeze(-1).to(x.dtype)], -1)

    def decode(self, value: Tensor) -> tuple[Tensor, Tensor]:
        tokens = value[..., -1].detach().round().long()
        return value[..., :-1] @ self.columns.T + self.fixed[tokens], tokens


class _Spanned(nn.Linear):
    """A linear layer whose output lies in the subspace."""

    def __init__(self, inputs: int, subspace: Subspace) -> None:
        super().__init__(inputs, subspace.columns.shape[1])
        self._subspace = (subspace,)  # a tuple, so that it is not a submodule

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self._subspace[0].columns.T


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, subspace: Subspace | None) -> None:
        super().__init__()
        self.heads = _heads_of(width)
        self.norm = nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mlp_norm = nn.RMSNorm(width)
        self.fc = nn.Linear(width, hidden)
        if subspace is None:
            self.project, self.out = nn.Linear(width, width), nn.Linear(hidden, width)
        else:
            self.project, self.out = _Spanned(width, subspace), _Spanned(hidden, subspace)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.query_key_value(self.norm(x))
        x = x + self.project(_attended(projected, self.heads, rotates=True))
        return torch.add(x, self.out(F.relu(self.fc(self.mlp_norm(x))).square()))


def _rotated(x: Tensor) -> Tensor:
    length, width = x.shape[-2:]
    turning = width // 4
    rates = _BASE ** -torch.linspace(0, 1, turning, device=x.device, dtype=x.dtype)
    rates = torch.cat([rates, rates.new_zeros(width // 2 - turning)])
    angles = torch.outer(torch.arange(length, device=x.device, dtype=x.dtype), rates)
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


class _Layer(nn.Module):
    """A block; the first one with the embedding, the last one with the head."""

    def __init__(
        self,
        block: _Block,
        first: nn.Embedding | None,
        head: nn.Linear | None,
        subspace: Subspace | None,
    ) -> None:
        super().__init__()
        self.embedding, self.block, self.head, self.subspace = first, block, head, subspace
        width = block.norm.weight.numel()
        self.entry_norm = None if first is None or subspace is not None else nn.RMSNorm(width)
        self.head_norm = None if head is None else nn.RMSNorm(width)

    def forward(self, value: Tensor) -> Tensor:
        x, tokens = value, value
        if self.embedding is not None:
            x = self.embedding(tokens)
            if self.subspace is not None:
                x = x @ self.subspace.columns.T + self.subspace.fixed[tokens]
            elif self.entry_norm is not None:
                x = self.entry_norm(x)
        elif self.subspace is not None:
            x, tokens = self.subspace.decode(value)
        x = self.block(x)
        if self.head is not None and self.head_norm is not None:
            logits: Tensor = self.head(self.head_norm(x))
            return _CAP * logits * (logits.square() + _CAP**2).rsqrt()
        return x if self.subspace is None else self.subspace.encode(x, tokens)


def speedrun(
    stages: int,
    *,
    vocabulary: int,
    width: int = 64,
    depth: int = 8,
    rank: int | None = None,
    seed: int = 0,
) -> list[nn.Module]:
    """Return the model in ``stages`` modules: int64 tokens to logits of the next token."""
    layers: list[nn.Module] = []
    with seeded(seed):
        for k in range(depth):
            subspace = None if rank is None else Subspace(vocabulary, width, rank)
            last = k == depth - 1
            # The last block has no edge after it.
            block = _Block(width, (4 if rank is None else 11) * width, None if last else subspace)
            embedding = nn.Embedding(vocabulary, rank or width) if k == 0 else None
            head = nn.Linear(width, vocabulary) if last else None
            layer = _Layer(block, embedding, head, subspace)
            for name, p in layer.named_parameters():
                if name.endswith("bias") or name.startswith(_ZEROS):
                    nn.init.zeros_(p)
                elif p.dim() == 2 and "embedding" not in name:
                    nn.init.normal_(p, std=(0.33 / p.shape[1]) ** 0.5)
            layers.append(layer)
    return cut_evenly(layers, stages)


_ZEROS = ("block.project", "block.out", "head.")


# The residual LSTM


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
    stages: int, *, vocabulary: int, width: int = 128, depth: int = 6, seed: int = 0
) -> list[nn.Module]:
    """Return an embedding, ``depth`` blocks, and a norm with a Linear in ``stages`` modules."""
    with seeded(seed):
        embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(embedding.weight, 0.0, 0.1)
        layers: list[nn.Module] = [embedding]
        layers += [LSTMBlock(width) for _ in range(depth)]
        layers.append(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary)))
    return cut_evenly(layers, stages)
