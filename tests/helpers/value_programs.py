"""The same model with tuples and with dicts between its stages, in one process and on ranks."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import torch
from helpers.cut_models import sgd
from helpers.replica_programs import stage_and_replica
from torch import nn

import spectrain_ext as st

from .passes import with_passes

WIDTH = 4
mse = nn.functional.mse_loss


@dataclass(slots=True)
class Output:
    parts: dict
    loss: None = None


class Part(nn.Module):
    """Takes and returns a hidden state and a mask; ``end``: the last stage's output."""

    def __init__(self, k, n, form, end):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.first, self.last, self.form, self.end = k == 0, k == n - 1, form, end

    def forward(self, value):
        if self.form == "dict":
            assert type(value) is dict
            value = value["x" if self.first else "h"], value["mask"]
        h, mask = value
        h = h + self.drop(torch.tanh(self.linear(h))) * mask[:, None]
        if self.last:
            return Output({"h": [h]}) if self.end == "dataclass" else h
        return {"h": h, "mask": mask} if self.form == "dict" else (h, mask)


def stages(n, form, end="tensor", dtype=torch.float32):
    torch.manual_seed(3)
    return [Part(k, n, form, end).to(dtype) for k in range(n)]


def data(sizes, form, dtype=torch.float32):
    """Return batches; in dict form every second one is a UserDict."""
    g = torch.Generator().manual_seed(11)
    made = []
    for i, size in enumerate(sizes):
        x, y = (torch.randn(size, WIDTH, generator=g, dtype=dtype) for _ in range(2))
        mask = (torch.rand(size, generator=g) > 0.3).to(dtype)
        if form == "dict":
            batch = {"labels": y, "x": x, "mask": mask}
            made.append(UserDict(batch) if i % 2 else batch)
        else:
            made.append(((x, mask), (y, mask)))
    return made


def loss_fn(form):
    def loss(output, target):
        if form == "dict":
            assert type(target) is dict
            y, mask = target["labels"], target["mask"]
        else:
            y, mask = target
        return (mse(output, y, reduction="none") * mask[:, None]).mean()

    return loss


def together(n, sizes, form, dtype=torch.float32, **settings):
    """Return losses and the states of all stages of an in-process run."""
    parts = stages(n, form, dtype=dtype)
    torch.manual_seed(5)
    pipe = st.Pipeline(parts, sgd, loss_fn(form), **settings)
    losses = [result.loss for result in pipe.run(data(sizes, form, dtype))]
    return losses, [part.state_dict() for part in parts]


class Nested(nn.Module):
    """Takes a batch with non-tensors and passes nested values on; also works uncut."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = k == 0, k == n - 1

    def forward(self, value):
        if self.first:
            assert type(value) is dict
            x = value["x"] * value["mask"][..., None] + value["positions"][..., None]
            rest = value["none"], value["words"], value["temperature"], value["weights"]
            value = {"h": [x, (x.detach() * 2, None)], "rest": rest, "step": value["step"]}
        h, (skip, nothing) = value["h"]
        none, words, temperature, weights = value["rest"]
        assert [type(of) for of in (value["h"], value["rest"], words)] == [list, tuple, list]
        assert nothing is none is None
        assert words == ["é", True, [], 0.5]
        assert type(value["step"]) is int
        h = torch.tanh(self.linear(h)) * words[-1] + skip * weights / (1 + value["step"])
        if self.last:
            return Output({"h": [h * temperature]})
        return {**value, "h": [h, (skip + h * h, None)]}


def nested_stages(n):
    torch.manual_seed(3)
    return [Nested(k, n) for k in range(n)]


#: Split dimensions of ``nested_data``; 0 if not listed.
NESTED_DIM = {"weights": None}


def nested_data(sizes, dtype=torch.float32):
    g = torch.Generator().manual_seed(13)
    found = []
    for step, size in enumerate(sizes):
        x, y = (torch.randn(size, 3, WIDTH, generator=g, dtype=dtype) for _ in range(2))
        batch = {
            "positions": torch.arange(3, dtype=dtype)[None] / 10,
            "step": step,
            "x": x,
            "mask": (torch.rand(size, 3, generator=g) > 0.3).to(dtype),
            "temperature": torch.tensor(1.5, dtype=dtype),
            "weights": torch.randn(WIDTH, generator=g, dtype=dtype),
            "words": ["é", True, [], 0.5],
            "none": None,
            "labels": y,
        }
        found.append(batch)
    return found


def cut_by_hand(batch, sizes, lengths):
    """Return microbatches of these sizes, each with its own length."""
    begin, found = 0, st.Microbatches()
    for size, length in zip(sizes, lengths, strict=True):
        part = dict(batch)
        for name in ("x", "mask", "labels"):
            part[name] = batch[name][begin : begin + size, :length]
        part["positions"] = batch["positions"][:, :length]
        found.append(part)
        begin += size
    return found if len(found) == 2 else list(found)


def nested_loss(output, batch):
    assert type(batch) is dict
    assert batch["words"] == ["é", True, [], 0.5]
    errors = (output.parts["h"][0] - batch["labels"]) * batch["mask"][..., None]
    return errors.square().mean() * (1 + batch["step"]) * batch["temperature"]


def nested_batches(dtype=torch.float32):
    """Return batches to cut and cut ones; one has fewer microbatches than allowed."""
    sizes = [6, 6, 7, 1, 8, 6]
    made = nested_data(sizes, dtype)
    made[1] = cut_by_hand(made[1], (1, 3, 2), (3, 2, 1))
    made[2] = cut_by_hand(made[2], (4, 3), (2, 3))
    made[4] = cut_by_hand(made[4], (2, 2, 2, 2), (3, 3, 3, 3))
    return made


def uncut_nested(n, made):
    """Return the losses and final weights of plain torch."""
    whole = nn.Sequential(*nested_stages(n)).to(made[0]["x"].dtype)
    optimizer, found = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9), []
    for batch in made:
        parts = batch if isinstance(batch, list) else [batch]
        sizes = [len(part["x"]) for part in parts]
        losses = [nested_loss(whole(part), part) for part in parts]
        loss = sum(each * size / sum(sizes) for each, size in zip(losses, sizes, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found, whole


def nested(rank=0, counts=None, codec=None):
    """Return losses, an evaluation and weights of this rank, or of all stages in one process."""
    made = nested_batches()
    more = {"method": "gpipe", "microbatches": 4, "split_dim": NESTED_DIM, "codec": codec}
    stages = nested_stages(2)
    if counts is None:
        pipe = st.Pipeline(stages, sgd, nested_loss, **with_passes(more))
    else:
        more |= {"replicas": counts, "share_loss": True}
        part = stages[stage_and_replica(counts, rank)[0]]
        pipe = st.DistributedPipeline(part, sgd, nested_loss, **with_passes(more))
    enough = [batch for batch in made if isinstance(batch, list) or len(batch["x"]) > 1]
    losses = [result.loss.item() for result in pipe.run(enough)]
    return losses, pipe.evaluate(made), pipe.state_dict()
