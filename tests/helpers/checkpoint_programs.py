"""Programs of ranks that save and load: inner, because one starts anew on an old store."""

from __future__ import annotations

import os
import shutil

import torch
import torch.distributed as dist
from helpers.checkpoint_cases import (
    LOSS,
    adapted,
    batches,
    ends,
    everything,
    halving,
    model,
    renamed,
    same,
    sgd,
    weights,
)
from torch.distributed import distributed_c10d
from torch.optim.lr_scheduler import ReduceLROnPlateau

import spectrain_ext as st
from spectrain_ext.checkpoint import (
    CheckpointError,
    CheckpointManager,
    ShuffledSampler,
    load,
    save,
)
from spectrain_ext.distributed import distributed_pipeline as rank_pipeline
from spectrain_ext.partitioning import cut_at


def refuse_pickles():
    """From now on, fail if anything is pickled for another process or unpickled."""

    def refused(*_):
        raise AssertionError("an object travels as a pickle")

    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refused


def stage_of(rank, seed, make=model):
    """Return a pipeline over two ranks, whose learning rate differs from rank to rank."""
    part = cut_at(make(seed), ends(4, 2))[rank]

    def optimizer(params):
        return st.optim.SGD(params, lr=0.05 * (rank + 1), momentum=0.9)

    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)

    return st.DistributedPipeline(part, optimizer, LOSS, scheduler=plateau, timeout=60.0)


def stages(rank, ranks, path):
    """Save and load a stage of each rank; return the sum of the saved values."""
    refuse_pickles()
    pipe, sampler = stage_of(rank, 1), ShuffledSampler(10, 2)
    list(pipe.run(batches(1, 1)))
    data = batches(1, 1) if rank == 0 else None
    pipe.schedulers[0].step(pipe.evaluate(data)["loss"])
    torch.manual_seed(rank)
    save(f"{path}/c", pipe, minibatches=3, sampler=sampler)
    expected = torch.rand(2)
    other = stage_of(rank, 2)
    list(other.run(batches(1, 2)))
    loaded = load(f"{path}/c", other)
    assert (loaded.random, loaded.minibatches) == (True, 3)
    assert torch.equal(torch.rand(2), expected)
    same(everything(other), everything(pipe))
    assert other.optimizers[0].param_groups[0]["lr"] == 0.05 * (rank + 1)
    later = stage_of(rank, 3, renamed)
    assert load(f"{path}/c", later).random
    found = {key.replace("inner", "linear"): value for key, value in everything(later).items()}
    same(found, everything(pipe))
    total = sum(p.double().sum().item() for p in pipe.parameters())
    for each in (pipe, other):  # a lower metric is a worse one, on every rank and after loading
        list(each.run(batches(1, 1)))
        each.schedulers[0].step(each.evaluate(data)["loss"] - 100)
        assert each.optimizers[0].param_groups[0]["lr"] == 0.025 * (rank + 1)
    same(everything(other), everything(pipe))
    save(f"{path}/alone{rank}", model())  # by this process alone
    for seed in range(9):  # and of one path, by both at once
        save(f"{path}/alone", model(seed), minibatches=seed, overwrite=True)
        assert load(f"{path}/alone", model()).minibatches <= 8
    return total


def adapters(rank, ranks, path):
    """Save adapters of each rank's stage, load them into others; return the stage's state."""

    def made(seed):
        part = cut_at(adapted(seed), ends(4, ranks))[rank]
        return st.DistributedPipeline(part, sgd, LOSS, timeout=60.0)

    pipe, other = made(0), made(7)
    list(pipe.run(batches(2)))
    save(f"{path}/c", pipe, trainable_only="verified")
    assert load(f"{path}/c", other).random
    same(everything(other), everything(pipe))
    return dict(pipe.state_dict())


def errors(rank, ranks, path):
    """Cause every documented error; return the messages."""
    found = []
    pipe = stage_of(rank, 1)

    def expect(action):
        try:
            action()
        except (CheckpointError, ValueError, RuntimeError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(None)

    expect(lambda: save(f"{path}/d", pipe, extra={1} if rank else None))
    assert not os.path.exists(f"{path}/d")
    save(f"{path}/d", pipe)
    dist.barrier()
    if rank == 0:
        with open(f"{path}/d/model-00002-of-00002.safetensors", "r+b") as stream:
            content = bytearray(stream.read())
            stream.seek(0)
            stream.write(bytes(byte ^ 1 for byte in content))
    dist.barrier()
    before = [p.clone() for p in pipe.parameters()]
    expect(lambda: load(f"{path}/d", pipe))
    assert all(map(torch.equal, before, pipe.parameters()))
    return found


def manager_of(path, rank, ranks, seed, timeout=60.0, chunks=1, **more):
    torch.manual_seed(4)  # the same on all ranks, as in one process
    parts = cut_at(model(seed), ends(4, chunks * ranks))[rank::ranks]
    given = {"scheduler": halving, "passes": [st.passes.ShareLoss()], "timeout": timeout}
    pipe = st.DistributedPipeline(
        parts if chunks > 1 else parts[0], sgd, LOSS, "spectrain", **given
    )
    return CheckpointManager(path, pipe, sampler=ShuffledSampler(9, 2), **more)


def trains(rank, ranks, path, chunks=1):
    """Train, stop, resume in another pipeline; return the results."""
    refuse_pickles()

    def mine(data):
        return data if rank in (0, ranks - 1) else None

    more = {"chunks": chunks, "every_minibatches": 2, "keep": 9}
    manager = manager_of(f"{path}/ranks", rank, ranks, 0, **more)
    first = [(r.index, r.loss.item()) for r in manager.run(mine(batches(5)))]
    manager.save()
    other = manager_of(f"{path}/ranks", rank, ranks, 7, **more)
    shutil.copytree(f"{path}/ranks/minibatch-00000002", f"{path}/copies/{rank}")
    load(f"{path}/copies/{rank}", other.pipe)  # a copy of the same checkpoint
    assert other.restore().random
    assert other.minibatches == 5
    refused = []
    for which, only_model in ((2 if rank == 0 else 4, False), (4, rank > 0)):
        try:
            load(f"{path}/ranks/minibatch-0000000{which}", other.pipe, only_model=only_model)
        except CheckpointError as error:
            refused.append(str(error))
    second = [(r.index, r.loss.item()) for r in other.run(mine(batches(4, seed=1)))]

    # rank 0's clock counts, and any rank that leaves the loop ends it for all
    seconds = {"every_seconds": 0 if rank == 0 else 1e9}
    timed = manager_of(f"{path}/timed", rank, ranks, 0, chunks=chunks, **seconds)
    list(timed.run(mine(batches(2))))
    for _ in timed.run(mine(batches(9))):
        if rank == 1:
            break
    return first, second, everything(other.pipe), timed.minibatches, refused


def replicated(rank, ranks, path):
    """Train replicated stages, resume in another pipeline, then with other replicas and cuts.

    Returns losses and weights of both trainings, and the weights that the others loaded.
    """

    def manager_of(seed, counts, stage, cuts):
        torch.manual_seed(4)
        part = cut_at(model(seed), ends(4, cuts))[stage]
        more = {
            "replicas": counts,
            "microbatches": 2,
            "passes": [st.passes.ShareLoss()],
            "timeout": 60.0,
        }
        pipe = st.DistributedPipeline(part, sgd, LOSS, scheduler=halving, **more)
        return CheckpointManager(f"{path}/replicas", pipe, keep=9)

    def trained(manager, count, seed):
        return [(r.index, r.loss.item()) for r in manager.run(batches(count, seed))]

    # the second one overwrites the initial weights of the replicas
    first, other = (manager_of(seed, [1, 2], min(rank, 1), 2) for seed in (0, 7))
    trained(first, 5, 0)
    first.save()
    expected = trained(first, 4, 1)
    assert other.restore().random
    assert trained(other, 4, 1) == expected  # including dropout
    states = [weights(manager.pipe) for manager in (first, other)]
    loaded = []
    for counts, stage, cuts in (([2, 1], rank // 2, 2), (None, rank, 3)):
        manager = manager_of(9, counts, stage, cuts)
        assert not manager.restore().random
        part = next(iter(manager.pipe.children()))
        loaded.append({part.cut.full_name(k): v.clone() for k, v in part.state_dict().items()})
    return expected, states, loaded


def same_store(rank, ranks):
    """Start the same pipeline twice on a store that outlives it; return the error."""
    manager_of(".", rank, ranks, 0)
    rank_pipeline._made.clear()
    try:
        manager_of(".", rank, ranks, 0)
    except RuntimeError as error:
        return str(error)
