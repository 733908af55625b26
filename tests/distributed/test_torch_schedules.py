"""Tests gpipe and 1f1b against torch.distributed.pipelining: two gloo processes, equal stages."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from helpers.pipeline_cases import batches, close, float64, mse, tanh_stages  # noqa: F401
from helpers.ranks import run_ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import spectrain_ext as st

pytestmark = pytest.mark.processes
OPTIONS = {"lr": 0.05, "momentum": 0.9}
CASES = [(schedule, m) for schedule in ("gpipe", "1f1b") for m in (2, 5)]


def train_by_torch(rank, ranks, stages, data):
    """Return the losses and this stage's final weights."""
    found = []
    for (schedule, m), given in zip(CASES, data, strict=True):
        module = copy.deepcopy(stages[rank])
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        pipe = kind(PipelineStage(module, rank, 2, torch.device("cpu")), m, loss_fn=mse)
        optimizer = torch.optim.SGD(module.parameters(), **OPTIONS)
        losses = []
        for value, target in given:
            optimizer.zero_grad()
            parts = []
            if rank == 0:
                pipe.step(value)
            else:
                pipe.step(target=target, losses=parts)
                losses.append(torch.stack(parts).mean().detach())
            optimizer.step()
        found.append((losses, [p.detach() for p in module.parameters()]))
    return found


def test_torchs_pipelining_computes_the_same():
    stages, data = tanh_stages(2), [batches(4, size=2 * m) for _, m in CASES]
    found = zip(CASES, data, *run_ranks(train_by_torch, 2, stages, data), strict=True)
    for (schedule, m), given, first, last in found:
        parts = copy.deepcopy(stages)
        optimizer = partial(st.optim.SGD, **OPTIONS)
        pipe = st.Pipeline(parts, optimizer, mse, schedule, microbatches=m)
        close([result.loss for result in pipe.run(given)], last[0])
        for part, (_, weights) in zip(parts, (first, last), strict=True):
            close([p.detach() for p in part.parameters()], weights)
