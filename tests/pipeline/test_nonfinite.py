"""Losses and gradients that are not finite: what is left out, and what is raised."""

from __future__ import annotations

import copy
from math import inf, nan

import pytest
import torch
from helpers.pipeline_cases import (
    batches,
    float64,  # noqa: F401  # a fixture
    mse,
    sgd,
    tanh_stages,
)
from torch import nn

import spectrain_ext as st


class Overflow(torch.autograd.Function):
    """Identity; where an input is 7 or more, its gradient is infinite, and nothing else."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return torch.where(value >= 7, inf, gradient)


class Overflows(nn.Module):
    def forward(self, value):
        return Overflow.apply(value)


def everything(n=3):
    """Stages with running statistics and random numbers."""
    return [
        nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 5))
        for _ in range(n)
    ]


def poisoned(batch, what):
    value, target = (tensor.clone() for tensor in batch)
    (value if what == "input" else target)[-1, 2] = nan
    return value, target


def state_of(pipe):
    return [
        pipe.state_dict(),
        [o.state_dict()["state"] for o in pipe.optimizers],
        [s.state_dict() for s in pipe.schedulers],
        [r.states() for r in pipe.random],
    ]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["input", "target"])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sync", {}),
        ("gpipe", {"microbatches": 3, "clip_norm": 0.1, "recompute": True}),
        ("1f1b", {"microbatches": 2, "clip_norm": 0.1, "clip_scope": "stage"}),
        ("zb-h1", {"microbatches": 3}),
    ],
)
def test_with_a_flush_it_is_as_if_the_batch_had_never_come(method, more, what):
    data = batches(7, size=6)
    runs = []
    stages = everything()
    for skips in (True, False):
        torch.manual_seed(1)
        pipe = st.Pipeline(
            copy.deepcopy(stages),
            sgd(),
            mse,
            method,
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
            on_nonfinite="skip" if skips else None,
            **more,
        )
        given = list(data)
        if skips:
            given[2:2] = [poisoned(data[0], what)] * 2
        losses = [result.loss for result in pipe.run(given)]
        if skips:
            assert all(loss.isnan() for loss in losses[2:4])
            del losses[2:4]
            assert pipe.skipped == (2, 2, 2)
        runs.append((losses, state_of(pipe)))
    same(*runs)
