"""Stages, data and pipelines with replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import spectrain_ext as st

from .passes import with_passes

WIDTH = 5
RUNS = [(6, 12, 5), (4, 12, 3)]  # minibatches, samples of each, samples of the last
mse = nn.functional.mse_loss


def stages(n: int, layers: int = 1) -> list[nn.Sequential]:
    torch.manual_seed(3)
    return [
        nn.Sequential(
            *(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH).double(), nn.Tanh()))
        )
        for _ in range(n)
    ]


def data(count: int, size: int = 8, last: int | None = None) -> list[Any]:
    g = torch.Generator().manual_seed(11)
    sizes = [size] * (count - 1) + [size if last is None else last]
    return [
        tuple(torch.randn(s, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
        for s in sizes
    ]


def sgd(params: Any, smoothed: bool = False) -> st.optim.SGD:
    return st.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.01, smoothed=smoothed)


def averaging(params: Any) -> st.optim.SGD:
    return sgd(params, smoothed=True)


def steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)


def stage_and_replica(counts: Sequence[int], rank: int) -> tuple[int, int]:
    """(stage, replica) of a rank, counted directly."""
    return [(k, c) for k, r in enumerate(counts) for c in range(r)][rank]


def make(
    rank: int,
    counts: Sequence[int],
    method: str | st.Method = "vanilla",
    optimizer: Any = sgd,
    part: nn.Module | None = None,
    **settings: Any,
) -> st.DistributedPipeline:
    """Make a pipeline with so many replicas of each stage."""
    if part is None:
        part = stages(len(counts))[stage_and_replica(counts, rank)[0]]
    settings = {"timeout": 100.0, "replicas": counts, **settings}
    loss = settings.pop("loss_fn", mse)
    return st.DistributedPipeline(part, optimizer, loss, method, **with_passes(settings))


def row(module: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


# A model of words, with losses by words

WORDS, IGNORED = 7, -100


def words(k: int) -> nn.Sequential:
    """Return stage ``k`` of two of a model of words."""
    torch.manual_seed(5 + k)
    parts = [(nn.Embedding(WORDS, WIDTH), nn.Tanh()), (nn.Linear(WIDTH, WORDS),)][k]
    return nn.Sequential(*parts).double()


def sentences(count: int = 5) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of eight rows of 1 to 12 words, some without the first or last rows."""
    g = torch.Generator().manual_seed(3)
    for i in range(count):
        ids, labels = torch.randint(WORDS, (2, 8, 12), generator=g).unbind()
        lengths = torch.randint(1, 13, (8,), generator=g)
        labels[torch.arange(12)[None] >= lengths[:, None]] = IGNORED
        if i % 2:
            labels[slice(6, 8) if i == 1 else slice(0, 3)] = IGNORED
        yield ids, labels


def counting(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def total_and_count(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, counting(labels)
