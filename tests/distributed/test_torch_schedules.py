"""Tests gpipe and 1f1b against torch.distributed.pipelining: two gloo processes, equal stages."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import (
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    mse,
    tanh_stages,
)
from helpers.ranks import run_ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import spectrain_ext as st

pytestmark = pytest.mark.processes
OPTIONS = {"lr": 0.05, "momentum": 0.9}
CASES = [(schedule, m) for schedule in ("gpipe", "1f1b") for m in (2, 5)]


def train_by_torch(rank, ranks, stages, data):
    """Return the losses, and this stage's gradients of every update and its final weights."""
    found = []
    for (schedule, m), given in zip(CASES, data, strict=True):
        module = copy.deepcopy(stages[rank])
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        pipe = kind(PipelineStage(module, rank, 2, torch.device("cpu")), m, loss_fn=mse)
        optimizer = torch.optim.SGD(module.parameters(), **OPTIONS)
        losses, gradients = [], []
        for value, target in given:
            optimizer.zero_grad()
            parts = []
            if rank == 0:
                pipe.step(value)
            else:
                pipe.step(target=target, losses=parts)
                losses.append(torch.stack(parts).mean().detach())
            gradients.append([p.grad.clone() for p in module.parameters()])
            optimizer.step()
        found.append((losses, gradients, [p.detach() for p in module.parameters()]))
    return found


def test_torchs_pipelining_computes_the_same():
    stages, data = tanh_stages(2), [batches(4, size=2 * m) for _, m in CASES]
    found = zip(CASES, data, *run_ranks(train_by_torch, 2, stages, data), strict=True)
    for (schedule, m), given, first, last in found:
        parts, gradients = copy.deepcopy(stages), []

        def optimizer(params, gradients=gradients):
            made = st.optim.SGD(params, **OPTIONS)
            gradients.append(of_stage := [])
            made.register_step_pre_hook(
                lambda *_: of_stage.append([p.grad.clone() for p in params])
            )
            return made

        pipe = st.Pipeline(parts, optimizer, mse, schedule, microbatches=m)
        losses = [result.loss for result in pipe.run(given)]
        close(losses, last[0])
        for k, (_, of_torch, weights) in enumerate((first, last)):
            close(gradients[k], of_torch)
            close([p.detach() for p in parts[k].parameters()], weights)
