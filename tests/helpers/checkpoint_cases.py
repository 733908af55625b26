"""Models and comparisons of the checkpoint tests."""

from __future__ import annotations

import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at

LOSS = nn.functional.mse_loss


class Noisy(nn.Module):
    """Has a buffer that changes, and draws random numbers."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.norm(torch.tanh(self.linear(x))))


def model(seed=0, blocks=4):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(Noisy() for _ in range(blocks)))


def ends(blocks, n):
    return [(k + 1) * blocks // n for k in range(n)]


def sgd(params):
    return st.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


def nadam(params):
    return st.optim.NAdam(params, lr=0.01)


def adamw(params):
    return st.optim.AdamW(params, lr=0.01)


def halving(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)


def pipeline(n=2, seed=0, *, optimizer=sgd, method="spectrain", scheduler=halving, blocks=4):
    stages = cut_at(model(seed, blocks), ends(blocks, n))
    return st.Pipeline(stages, optimizer, LOSS, method, scheduler=scheduler)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator))
        for _ in range(count)
    ]


def train(pipe, data):
    return [result.loss for result in pipe.run(data)]


def everything(pipe):
    """Return all state of a pipeline by the model's names."""
    found = {}
    for stage in pipe.children():
        found.update((stage.full_name(k), v) for k, v in stage.state_dict().items())
    for k, optimizer in enumerate(pipe.optimizers):
        for index, entry in optimizer.state_dict()["state"].items():
            members = entry if isinstance(entry, dict) else {"": entry}
            found.update((f"state.{k}.{index}.{key}", v) for key, v in members.items())
    for k, stage in enumerate(pipe.random):
        found.update((f"random.{k}.{j}", state) for j, state in enumerate(stage.states()))
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def weights(module):
    return {key: value.clone() for key, value in module.state_dict().items()}
