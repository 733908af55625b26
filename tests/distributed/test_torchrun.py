"""Tests the documented use of torchrun: a script that is killed, restarted, and resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Timer

import bench_failures
import pytest
import torch
from helpers import checkpoint_programs
from helpers.ranks import run_ranks, run_script
from torch import nn

from spectrain_ext.checkpoint import load

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "torchrun.py"
# Python's path entry for a script is its folder; the package comes from its present location.
HERE = {
    **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
}

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
import spectrain_ext as st
from spectrain_ext.checkpoint import ShuffledSampler
from spectrain_ext.partitioning import cut_at

rank, ranks = st.join_ranks()  # instead of init_process_group
torch.manual_seed(0)  # the same on every rank
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4)))
data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.randn(60, 8))
sampler = ShuffledSampler(len(data), batch_size=6, seed=1)
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

pipe = st.DistributedPipeline(
    cut_at(model, ends=[4 * (k + 1) // ranks for k in range(ranks)])[rank],
    optimizer=lambda parameters: st.optim.SGD(parameters, lr=0.05, momentum=0.9),
    loss_fn=nn.functional.mse_loss,
    timeout=60,
)
manager = st.checkpoint.CheckpointManager("checkpoints", pipe, sampler=sampler, every_minibatches=5)
manager.restore()
while sampler.epoch < 3:
    for result in manager.run(loader):
        if rank == ranks - 1:
            print(result.index, result.loss.item(), flush=True)
dist.destroy_process_group()
"""


def test_a_restarted_group_ends_as_if_it_had_never_been_killed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    command = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --max-restarts 1"
    command += " --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
    arguments = [str(TESTS / "helpers" / "killed_once.py"), str(script), "1", "17", "killed-at"]
    done = subprocess.run(
        [*command.split(), *arguments],
        cwd=tmp_path / "killed",
        env={**os.environ, **HERE, "TMPDIR": str(tmp_path)},  # for the failure report
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed" / "killed-at").exists()
    # also, up to torch 2.10: [Gloo] Rank 0 is connected to 1 peer ranks.
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


def test_the_example_goes_on_with_any_number_of_processes(tmp_path):
    """Stages move, and replicas are added and removed."""
    pytest.importorskip("sklearn")
    for epochs, ranks in enumerate((2, 3, 4, 2), start=1):
        arguments = ("--checkpoints", str(tmp_path), "--epochs", str(epochs))
        printed = run_script(EXAMPLE, ranks, *arguments, folder=tmp_path)
        assert re.findall(r"epoch (\d+): ", printed) == [str(epochs)]


def test_the_example_saves_and_exits_when_told_to_stop(tmp_path):
    pytest.importorskip("sklearn")
    stop = tmp_path / "stop"
    stop.touch()
    arguments = ("--checkpoints", str(tmp_path / "saved"), "--epochs", "1")
    assert run_script(EXAMPLE, 2, *arguments, "--stop-file", str(stop), folder=tmp_path) == ""
    assert (tmp_path / "saved" / "latest").exists()
    stop.unlink()
    printed = run_script(EXAMPLE, 2, *arguments, "--stop-file", str(stop), folder=tmp_path)
    assert re.findall(r"epoch (\d+): ", printed) == ["1"]


@pytest.mark.nightly
def test_a_machine_that_is_lost_is_done_without(tmp_path):
    """Two launchers with one process each; both processes of one launcher are killed."""
    pytest.importorskip("sklearn")
    kept = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = f"{sys.executable} -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1"
    command += " --max-restarts 3 --rdzv-backend c10d --local-addr 127.0.0.1"
    command += f" --rdzv-endpoint 127.0.0.1:{kept.port}"
    command += " --rdzv-conf is_host=0,last_call_timeout=2,keep_alive_interval=1"
    command += f" {EXAMPLE} --checkpoints {tmp_path} --epochs 12 --every 10 --timeout 5"
    said, says = os.pipe()
    launchers = [
        subprocess.Popen(command.split(), env={**os.environ, **HERE}, stdout=says) for _ in range(2)
    ]
    os.close(says)

    def end(launcher):
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        for pid in (launcher.pid, *map(int, ranks)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    late = Timer(240.0, lambda: [end(each) for each in launchers])
    late.start()
    seen = []
    with open(said) as lines:
        for line in lines:
            seen += re.findall(r"^epoch (\d+): ", line)
            if seen[-1:] == ["1"]:
                end(launchers[1])
            if seen[-1:] == ["12"]:
                break
        late.cancel()
        end(launchers[0])
    for each in launchers:
        each.wait()
    assert seen[-1] == "12"
    latest = tmp_path / (tmp_path / "latest").read_text().strip()
    assert (latest / "model.safetensors").exists()  # from one process


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_random_faults_cost_no_bit(seed, tmp_path):
    pytest.importorskip("sklearn")
    given = f"--campaign 8 --minibatches 300 --seed {seed} --directory {tmp_path}"
    found = bench_failures.campaign(bench_failures.parsed(given.split()))
    assert found["failed"] == []
    assert all(0 <= row["lost"] <= 10 for row in found["faults"])
