"""What the documentation says of torchrun: a script that is killed, restarted, and goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_programs
from helpers.ranks import run_ranks, run_script
from torch import nn

from spectrain_ext.checkpoint import load

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]


def example():
    """The script in the documentation that has the name train.py."""
    text = (TESTS.parent / "docs" / "checkpoints.md").read_text()
    (found,) = re.findall(r"```python\n(# train\.py: torchrun .*?)```", text, re.DOTALL)
    return found


def test_a_restarted_group_ends_as_if_it_had_never_been_killed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(example())
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    command = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --max-restarts 1"
    command += " --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
    arguments = [str(TESTS / "helpers" / "killed_once.py"), str(script), "1", "17", "killed-at"]
    # Python's own path entry for a script is its folder: the package comes from where it is here.
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*command.split(), *arguments],
        cwd=tmp_path / "killed",
        env={
            **os.environ,
            **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            "TMPDIR": str(tmp_path),  # for the report of the failure
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed" / "killed-at").exists()
    # beside them, up to torch 2.10: [Gloo] Rank 0 is connected to 1 peer ranks.
    indices = [int(index) for index in re.findall(r"^(\d+) [\d.]+", done.stdout, re.MULTILINE)]
    assert indices == [*range(17), *range(15, 30)]

    run_script(script, 2, folder=tmp_path / "whole")
    states = []
    for name in ("killed", "whole"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        last = tmp_path / name / "checkpoints" / "minibatch-00000030"
        assert load(last, model, optimizer=optimizer).minibatches == 30
        momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        states.append([*model.state_dict().values(), *momentum])
    assert all(map(torch.equal, *states))


def test_a_store_that_outlives_a_restart_is_refused():
    for reason in run_ranks(checkpoint_programs.same_store, 2):
        assert reason.startswith("the process group's store has outlived a restart")
