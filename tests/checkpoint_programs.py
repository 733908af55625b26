"""What the processes of test_checkpoint_processes.py run; a spawned process imports it by name."""

from __future__ import annotations

import os
import traceback

import torch
import torch.distributed as dist
from checkpoint_cases import Noisy, batches, model
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
