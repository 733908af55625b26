"""Tests gpipe and 1f1b against torch.distributed.pipelining: two gloo processes, equal stages."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.pipeline_cases import (
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    mse,
    tanh_stages,
)

import spectrain_ext as st

OPTIONS = {"lr": 0.05, "momentum": 0.9}
PEER = Path(__file__).parents[1] / "helpers" / "peer_stage.py"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without gloo"
    ),
]


def peers(jobs, folder):
    """Return both ranks' answers to every job. The store starts first and picks a free port."""
    file = folder / "work"
    torch.save(jobs, file)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PEER), str(rank), str(store.port), str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return [torch.load(f"{file}.{rank}", weights_only=False) for rank in range(2)]


def trained(job):
    """Return the losses, and each stage's gradients of every update and its final weights."""
    stages = copy.deepcopy(job["stages"])
    gradients = {}

    def optimizer(params):
        made = st.optim.SGD(params, **OPTIONS)
        of_stage = gradients[params[0]] = []
        made.register_step_pre_hook(lambda *_: of_stage.append([p.grad.clone() for p in params]))
        return made

    pipe = st.Pipeline(stages, optimizer, mse, job["schedule"], microbatches=job["microbatches"])
    losses = [result.loss for result in pipe.run(job["batches"])]
    return losses, list(gradients.values()), [list(stage.parameters()) for stage in stages]


def test_torchs_pipelining_computes_the_same(tmp_path):
    jobs = [
        {
            "schedule": schedule,
            "stages": tanh_stages(2),
            "batches": batches(4, size=2 * m),
            "microbatches": m,
            "options": OPTIONS,
        }
        for schedule in ("gpipe", "1f1b")
        for m in (2, 5)
    ]
    for job, first, last in zip(jobs, *peers(jobs, tmp_path), strict=True):
        losses, gradients, weights = trained(job)
        close(torch.stack(losses), torch.stack(last["losses"]))
        for k, theirs in enumerate((first, last)):
            close(gradients[k], theirs["gradients"])
            close([p.detach() for p in weights[k]], theirs["weights"])
