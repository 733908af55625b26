"""Send coordinates in a subspace over slow links instead of activations (arXiv 2506.01260).

python examples/subspace.py --rank 16 --steps 200

Blocks add to the residual only in the span of fixed columns, around a fixed embedding of the
tokens. Two modules at the ends of a stage therefore lose nothing: one computes coordinates, the
other restores activations. Autograd trains through both. A codec does what autograd need not see,
such as rounding: here it sends the coordinates as 8-bit integers.
"""

import argparse
import inspect
import json
import tempfile
from pathlib import Path

import torch
from torch import nn

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--stages", type=int, default=4)
arguments.add_argument("--width", type=int, default=64)
arguments.add_argument("--rank", type=int, default=16)
arguments.add_argument("--steps", type=int, default=60)
args = arguments.parse_args()

generator = torch.Generator().manual_seed(1337)  # every rank draws the same
COLUMNS = torch.linalg.qr(torch.randn(args.width, args.rank, generator=generator))[0]
FIXED = torch.randn(256, args.width, generator=generator)


class Encode(nn.Module):
    """Ends a stage: activations to coordinates."""

    def forward(self, x, tokens):
        # Codecs leave integers alone: send tokens in one byte each.
        return {"coordinates": (x - FIXED[tokens]) @ COLUMNS, "tokens": tokens.to(torch.uint8)}


class Decode(nn.Module):
    """Begins a stage: coordinates to activations."""

    def forward(self, value):
        tokens = value["tokens"].long()
        return value["coordinates"] @ COLUMNS.T + FIXED[tokens], tokens


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.coordinates = nn.Embedding(256, args.rank)

    def forward(self, tokens):
        return self.coordinates(tokens) @ COLUMNS.T + FIXED[tokens], tokens


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(args.width), nn.RMSNorm(args.width)
        self.query_key_value = nn.Linear(args.width, 3 * args.width)
        self.project = nn.Linear(args.width, args.rank)  # into the subspace
        self.mlp = nn.Sequential(
            nn.Linear(args.width, 8 * args.width), nn.GELU(), nn.Linear(8 * args.width, args.rank)
        )

    def forward(self, x):
        parts = self.query_key_value(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2)) @ COLUMNS.T
        return x + self.mlp(self.mlp_norm(x)) @ COLUMNS.T


class Stage(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.entry, self.block = Embed() if first else Decode(), Block()
        self.exit = None if last else Encode()
        self.head = nn.Linear(args.width, 256) if last else None

    def forward(self, value):
        x, tokens = self.entry(value)
        x = self.block(x)
        return self.exit(x, tokens) if self.head is None else self.head(x)


torch.manual_seed(0)
text = torch.frombuffer(bytearray(inspect.getsource(inspect).encode()), dtype=torch.uint8).long()


def batch(size=16, length=64):
    at = torch.randint(len(text) - length, (size, 1)) + torch.arange(length + 1)
    return text[at[:, :-1]], text[at[:, 1:]]


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


last = args.stages - 1
pipe = st.Pipeline(
    [Stage(k == 0, k == last) for k in range(args.stages)],
    lambda parameters: st.optim.AdamW(parameters, lr=3e-3),
    loss_fn,
    passes=[st.passes.Compress(st.codecs.Int8())],
)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "metrics.jsonl"
    with st.Metrics(pipe, path, every=args.steps) as metrics:
        for result in pipe.run((batch() for _ in range(args.steps)), trace=metrics):
            if result.index % 20 == 0:
                print(result.index, f"{result.loss.item():.3f} nats a byte")
    records = map(json.loads, path.read_text().splitlines())
    sent = next(record["bytes_sent"]["next"] for record in records if record["stage"] == 0)
print(
    f"a token takes {sent / (16 * 64 * args.steps):.1f} bytes to the next stage instead of "
    f"{4 * args.width}"
)
