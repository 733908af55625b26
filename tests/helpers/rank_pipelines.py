"""Pipelines of cut models that other rooms run in one process and on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from helpers.rank_cases import Case
from torch import Tensor, nn

import spectrain_ext as st

WIDTH = 6


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randn(count, 2, 8, WIDTH, generator=torch.Generator().manual_seed(11))
    return [(x, y) for x, y in drawn]


def optimizer(params: Any) -> st.optim.SGD:
    return st.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.01)


def pipeline(rank: int, ranks: int, parts: Any) -> st.Pipeline:
    mse = nn.functional.mse_loss
    if ranks == 1:
        return st.Pipeline(parts, optimizer, mse)
    return st.DistributedPipeline(list(parts)[rank], optimizer, mse, timeout=30.0)


def measured(rank: int, ranks: int, path: str) -> None:
    case = Case("vanilla", (ranks, 1))
    pipe = case.pipeline(rank)
    with st.Metrics(pipe, path, every=4) as metrics:
        for _ in pipe.run(case.batches([8] * 9), trace=metrics):
            pass


class Twice(nn.Module):
    """Not a sequence; uses one module twice, another one's weight, and a buffer in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.middle.weight
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.middle, self.last):
            x = torch.tanh(layer(x)) * self.scale
        found: Tensor = self.first(x)
        return found


def _tied(name: str) -> Any:
    torch.manual_seed(3)
    if name == "traced":
        return st.partition(Twice(), 3, torch.zeros(2, WIDTH), split_points=["middle", "last"])
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers[3].weight = layers[2].weight = layers[0].weight
    return st.partitioning.cut_at(layers, [1, 3, 4])


def _state(pipe: st.Pipeline) -> Iterator[tuple[str, Tensor]]:
    for stage in pipe.children():
        for key, value in stage.state_dict().items():
            yield stage.full_name(key), value.clone()


def tied_and_cut(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Return two models' losses, and their states after training and resuming, by name."""
    found = {}
    for name in ("sequence", "traced"):
        pipe = pipeline(rank, ranks, _tied(name))
        losses = [result.loss.item() for result in pipe.run(data(5)) if rank == ranks - 1]
        st.checkpoint.save(f"{folder}/{name}", pipe)
        trained = dict(_state(pipe))
        other = pipeline(rank, ranks, _tied(name))
        for _ in other.run(data(2)):
            pass
        for buffer in other.buffers():
            buffer.zero_()
        st.checkpoint.load(f"{folder}/{name}", other)
        loaded = dict(_state(other))
        for _ in other.run(data(3)):
            pass
        found[name] = losses, trained, loaded, dict(_state(other))
        if name == "sequence":
            untied = {**dict(_state(other)), "0.weight": torch.zeros(WIDTH, WIDTH)}
            try:
                other.load_state_dict(untied)
            except ValueError as error:
                assert "'0.weight' and '" in str(error), error
            else:  # this rank sees one of the names only
                assert rank == 0 < ranks - 1
    return found
