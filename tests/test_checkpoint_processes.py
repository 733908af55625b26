"""Several processes, one stage each: one checkpoint, which loads anywhere else."""

from __future__ import annotations

import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoint_cases import Noisy, batches, model, pipeline, train
from torch import nn

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointError, load, save
from spectrain_ext.data.sampler import ShuffledSampler
from spectrain_ext.partitioning import Slice, cut_at

WORLD = 2


def stage_of(rank, seed):
    """A process's part of the model, trained a little on its own."""
    part = cut_at(model(seed), [2, 4])[rank]
    optimizer = st.optim.SGD(part.parameters(), lr=0.05 * (rank + 1), momentum=0.9)
    return part, optimizer


def step(part, optimizer, seed):
    inputs, targets = batches(1, seed)[0]
    nn.functional.mse_loss(part(inputs), targets).backward()
    optimizer.step()


def worker(rank, store, actions, path, answers):
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
        try:
            answers.put((rank, actions(rank, path)))
        finally:
            dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise


def together(actions, tmp_path):
    """Run ``actions(rank, path)`` in every process; returns what each returned."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    store = tmp_path / f"store-{actions.__name__}"
    processes = [
        context.Process(target=worker, args=(rank, store, actions, str(tmp_path), answers))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * WORLD
    return dict(answers.get() for _ in processes)


def save_and_load(rank, path):
    part, optimizer = stage_of(rank, seed=1)
    step(part, optimizer, 1)
    torch.manual_seed(rank)
    save(
        f"{path}/c",
        part,
        optimizer=optimizer,
        minibatches=3,
        sampler=ShuffledSampler(10, 2),
        first_stage=rank,
    )
    expected = torch.rand(2)
    other, its_optimizer = stage_of(rank, seed=2)
    step(other, its_optimizer, 2)
    loaded = load(f"{path}/c", other, optimizer=its_optimizer, first_stage=rank)
    assert loaded.random
    assert torch.equal(torch.rand(2), expected)
    assert (os.path.exists(f"{path}/c"), loaded.minibatches) == (True, 3)
    for a, b in zip(part.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        buffers = [o.state[p]["momentum_buffer"] for o, p in ((optimizer, a), (its_optimizer, b))]
        assert torch.equal(*buffers)
    assert its_optimizer.param_groups[0]["lr"] == 0.05 * (rank + 1)
    return sum(p.double().sum().item() for p in part.parameters())


def errors(rank, path):
    found = []
    part, optimizer = stage_of(rank, seed=1)

    def expect(action):
        try:
            action()
        except (CheckpointError, ValueError, RuntimeError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(None)

    same_stage = Slice([Noisy()], 0)
    expect(lambda: save(f"{path}/d", part, first_stage=0))
    expect(lambda: save(f"{path}/d", same_stage, first_stage=rank))
    expect(lambda: save(f"{path}/d", part, first_stage=rank, extra={1} if rank else None))
    expect(lambda: save(f"{path}/missing\0name", part, first_stage=rank))
    assert not os.path.exists(f"{path}/d")
    save(f"{path}/d", part, optimizer=optimizer, first_stage=rank)
    dist.barrier()
    if rank == 0:
        with open(f"{path}/d/__1_0.distcp", "r+b") as stream:
            stream.seek(300)
            byte = stream.read(1)
            stream.seek(300)
            stream.write(bytes([byte[0] ^ 255]))
    dist.barrier()
    before = [p.clone() for p in part.parameters()]
    expect(lambda: load(f"{path}/d", part, first_stage=rank))
    assert all(map(torch.equal, before, part.parameters()))
    return found


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *_paths()]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", _loopback())


def _paths():
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _loopback():
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def test_one_checkpoint_of_two_processes(tmp_path):
    sums = together(save_and_load, tmp_path)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "checkpoint.json",
    ]
    plain = model(seed=9)
    sampler = ShuffledSampler(10, 2)
    loaded = load(tmp_path / "c", plain, sampler=sampler)
    assert (loaded.minibatches, loaded.random) == (3, False)
    for rank in range(WORLD):
        found = sum(p.double().sum().item() for p in plain[2 * rank : 2 * rank + 2].parameters())
        assert found == pytest.approx(sums[rank], abs=1e-12)
    # the stages had other learning rates: two stages here may have them too, one may not
    pipe = pipeline(2, seed=4, scheduler=None)
    load(tmp_path / "c", pipe)
    assert [o.param_groups[0]["lr"] for o in pipe.optimizers] == [0.05, 0.1]
    assert len(train(pipe, batches(2))) == 2
    with pytest.raises(CheckpointError, match=r"saved with lr=0\.05, and '2\..*lr=0\.1; give them"):
        load(tmp_path / "c", pipeline(1, scheduler=None))


def test_what_fails_in_one_process_fails_in_all(tmp_path):
    found = together(errors, tmp_path)
    a, b = found[0], found[1]
    assert a[0] == b[0] == "ValueError: first_stage: stage 0 is saved by process 0 and process 1"
    assert a[1].startswith("ValueError: first_stage: 'model.0.linear.weight' is saved by process 0")
    assert a[2].startswith("RuntimeError: process 1: TypeError: extra: a checkpoint cannot hold")
    assert b[2].startswith("TypeError: extra: a checkpoint cannot hold a builtins.set")
    assert None not in (a[3], b[3])
    for reason in (a[4], b[4]):
        assert reason.startswith("CheckpointError: ")
        assert "__1_0.distcp: damaged, the SHA-256 of 'model." in reason
