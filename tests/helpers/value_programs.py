"""The same model with tuples and with dicts between its stages, in one process and on ranks."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import spectrain_ext as st

WIDTH = 4
WORDS = 7
mse = nn.functional.mse_loss


class Named(NamedTuple):
    hidden: Tensor
    more: list


@dataclass(slots=True)
class Output:
    parts: dict
    loss: None = None


ENDS = {
    "tensor": (lambda h: h, lambda out: out),
    "dict": (lambda h: {"h": h, "none": None}, lambda out: out["h"]),
    "dataclass": (lambda h: Output({"h": [h]}), lambda out: out.parts["h"][0]),
    "named": (lambda h: Named(h, [3]), lambda out: out.hidden),
}


class Part(nn.Module):
    """Words and numbers come in, a hidden state and a mask go on, and there may be dropout."""

    def __init__(self, k, n, form, end="tensor", drop=0.2):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if k == 0 else None
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.last, self.form, self.end = k == n - 1, form, end

    def forward(self, value):
        keys = ("ids", "x", "mask") if self.words is not None else ("h", "mask")
        if self.form == "dict":
            assert type(value) is dict
            value = tuple(value[key] for key in keys)
        *values, mask = value
        if self.words is not None:
            ids, x = values
            values = [self.words(ids) + x]
        (h,) = values
        h = h + self.drop(torch.tanh(self.linear(h))) * mask[:, None]
        if self.last:
            return ENDS[self.end][0](h)
        return {"h": h, "mask": mask} if self.form == "dict" else (h, mask)


def stages(n, form, end="tensor", dtype=torch.float32, drop=0.2):
    torch.manual_seed(3)
    return [Part(k, n, form, end, drop).to(dtype) for k in range(n)]


def data(sizes, form, dtype=torch.float32):
    """Batches; as dicts they are a UserDict every second time."""
    g = torch.Generator().manual_seed(11)
    made = []
    for i, size in enumerate(sizes):
        ids = torch.randint(WORDS, (size,), generator=g)
        x, y = (torch.randn(size, WIDTH, generator=g, dtype=dtype) for _ in range(2))
        mask = (torch.rand(size, generator=g) > 0.3).to(dtype)
        if form == "dict":
            batch = {"labels": y, "x": x, "mask": mask, "ids": ids}
            made.append(UserDict(batch) if i % 2 else batch)
        else:
            made.append(((ids, x, mask), (y, mask)))
    return made


def loss_fn(form, end="tensor"):
    def loss(output, target):
        if form == "dict":
            assert type(target) is dict
            y, mask = target["labels"], target["mask"]
        else:
            y, mask = target
        return (mse(ENDS[end][1](output), y, reduction="none") * mask[:, None]).mean()

    return loss


def sgd(params):
    return st.optim.SGD(params, lr=0.05, momentum=0.9)


def together(n, sizes, form, end="tensor", dtype=torch.float32, drop=0.2, **settings):
    """Losses and the states of all stages, of a run in this process."""
    torch.manual_seed(5)
    parts = [copy.deepcopy(part) for part in stages(n, form, end, dtype, drop)]
    torch.manual_seed(5)
    pipe = st.Pipeline(parts, sgd, loss_fn(form, end), **settings)
    losses = [result.loss for result in pipe.run(data(sizes, form, dtype))]
    return losses, [part.state_dict() for part in parts]


def apart(rank, ranks, sizes, cases, drop=0.2):
    """The same of this rank with dicts, for one case after another."""
    found = []
    for end, settings in cases:
        counts = settings.get("replicas", [1] * ranks)
        k = [stage for stage, count in enumerate(counts) for _ in range(count)][rank]
        part = stages(len(counts), "dict", end, drop=drop)[k]
        torch.manual_seed(5)
        pipe = st.DistributedPipeline(
            part, sgd, loss_fn("dict", end), timeout=30.0, share_loss=True, **settings
        )
        results = list(pipe.run(None if rank else data(sizes, "dict")))
        found.append(([result.loss.item() for result in results], part.state_dict()))
    return found


class Recurrent(nn.Module):
    """(time, batch, features) in, and out; the last one has the last time's alone."""

    def __init__(self, last):
        super().__init__()
        self.lstm, self.last = nn.LSTM(WIDTH, WIDTH), last

    def forward(self, x):
        return self.lstm(x)[0][-1 if self.last else slice(None)]


def time_first(rank=0, ranks=1, **settings):
    """Losses, an evaluation and weights of this rank, or of both stages in one process."""
    torch.manual_seed(7)
    parts = [Recurrent(last) for last in (False, True)]
    data = [(torch.randn(5, size, WIDTH), torch.randn(size, WIDTH)) for size in (6, 6, 4, 6, 5)]
    more = {"microbatches": 4, "split_dim": (1, 0), **settings}
    if ranks == 1:
        pipe = st.Pipeline(parts, sgd, mse, **more)
    else:
        pipe = st.DistributedPipeline(parts[rank], sgd, mse, share_loss=True, **more)
    losses = [result.loss.item() for result in pipe.run(data)]
    return losses, pipe.evaluate(data), dict(pipe.state_dict())
