"""Evaluations and whole trainings that tests run in one process and on several ranks."""

from __future__ import annotations

import copy

import torch
from helpers import rank_pipelines, replica_programs
from helpers.replica_programs import seat
from torch import nn

import spectrain_ext as st

WIDTH = 5
SIZES = (6, 6, 11, 6, 3, 1, 6)  # larger than any batch of training, and smaller


def stages(n):
    """In training they draw, and keep statistics."""
    torch.manual_seed(3)
    return [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)
        )
        for _ in range(n)
    ]


def data(sizes, seed=11):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(s, WIDTH, generator=g), torch.randint(WIDTH, (s,), generator=g)) for s in sizes
    ]


def accuracy(output, target):
    return (output.argmax(-1) == target).float().mean()


class Count:
    """A metric with a state that must see all batches, in order."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.targets, self.right = [], 0

    def update(self, output, target):
        self.targets.append(target)
        self.right += int((output.argmax(-1) == target).sum())

    def compute(self):
        order = torch.cat(self.targets).double()
        return self.right + (order * torch.arange(len(order))).sum()


def metrics():
    return {"loss": nn.functional.cross_entropy, "accuracy": accuracy, "count": Count()}


def sgd(params):
    return st.optim.SGD(params, lr=0.05, momentum=0.9)


def settings_of(method, parts):
    return {"method": method, "microbatches": parts}


def program(pipe, feeds, evaluates=True):
    """What a training with evaluations in between gives: every process calls this."""
    torch.manual_seed(7)
    train = data([8] * 5)
    test = data(SIZES, seed=12)
    found = []

    def measure():
        if evaluates:
            found.append(pipe.evaluate(test if feeds else None, metrics()))
            found.append(pipe.evaluate(test if feeds else None))

    measure()
    kept = [r.kept for r in pipe.run(train if feeds else None, keep=accuracy)]
    measure()
    means = pipe.fit(train if feeds else None, 2)
    measure()
    output = pipe(test[2][0]) if evaluates else None
    return found, kept, means, output, pipe.state_dict(), torch.rand(())


def together(n, method, parts, evaluates=True):
    torch.manual_seed(5)
    pipe = st.Pipeline(stages(n), sgd, nn.functional.cross_entropy, **settings_of(method, parts))
    return program(pipe, True, evaluates)


def apart(rank, ranks, cases):
    found = []
    for counts, method, parts, more in cases:
        k, _ = seat(counts, rank)
        torch.manual_seed(5)
        pipe = st.DistributedPipeline(
            stages(len(counts))[k],
            sgd,
            nn.functional.cross_entropy,
            **settings_of(method, parts),
            timeout=30.0,
            replicas=counts,
            **more,
        )
        last = 0 if more.get("targets_from") == "first" else len(counts) - 1
        found.append(program(pipe, k in (0, last)))
    return found
