"""Evaluations and whole trainings for one process and for several ranks."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from helpers.replica_programs import stage_and_replica
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import spectrain_ext as st

WIDTH = 5
SIZES = (6, 6, 11, 6, 3, 1, 6)  # larger than any training batch, and smaller


def stages(n):
    """Return stages that draw random numbers and keep statistics in training."""
    torch.manual_seed(3)
    return [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)
        )
        for _ in range(n)
    ]


def data(sizes, seed=11):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(s, WIDTH, generator=g), torch.randint(WIDTH, (s,), generator=g)) for s in sizes
    ]


def accuracy(output, target):
    return (output.argmax(-1) == target).float().mean()


class Count:
    """A metric with a state that must see all batches in order."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.targets, self.right = [], 0

    def update(self, output, target):
        self.targets.append(target)
        self.right += int((output.argmax(-1) == target).sum())

    def compute(self):
        order = torch.cat(self.targets).double()
        return self.right + (order * torch.arange(len(order))).sum()


def metrics():
    return {"loss": nn.functional.cross_entropy, "accuracy": accuracy, "count": Count()}


def sgd(params):
    return st.optim.SGD(params, lr=0.05, momentum=0.9)


def program(pipe, feeds, evaluates=True):
    """Train with evaluations in between; every process calls this."""
    torch.manual_seed(7)
    train, test = data([12] * 5), data(SIZES, seed=12)
    found = []

    def measure():
        if evaluates:
            found.append(pipe.evaluate(test if feeds else None, metrics()))
            found.append(pipe.evaluate(iter(test) if feeds else None))

    measure()
    kept = [result.kept for result in pipe.run(train if feeds else None, keep=accuracy)]
    measure()
    seen = []
    callbacks = [lambda result: seen.append(result.index)]
    if isinstance(pipe, st.DistributedPipeline):  # the plain training does without
        callbacks.append(lambda _: trained_by_hand(pipe))
    means = pipe.fit(train if feeds else None, 2, callbacks)
    assert seen == list(range(10))
    measure()
    output = None
    if evaluates:
        pipe.eval()
        with torch.no_grad():
            output = pipe(test[2][0] if feeds else None)
        pipe.train()
    return found, kept, means, output, pipe.state_dict(), torch.rand(())


def trained_by_hand(pipe):
    """Do what has no effect in a loop, or is refused there."""
    nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3)
    for stage in pipe.children():
        stage.zero_grad()
    for optimizer in pipe.optimizers:
        with pytest.raises(RuntimeError, match=r"^step: a run of the pipeline has not ended"):
            optimizer.step()


def loaded(n, states):
    """Repeat the last two evaluations of ``program`` with each stage's weights and buffers."""
    pipe = st.Pipeline(stages(n), sgd, nn.functional.cross_entropy)
    pipe.load_state_dict({name: tensor for state in states for name, tensor in state.items()})
    test = data(SIZES, seed=12)
    return [pipe.evaluate(test, metrics()), pipe.evaluate(test)]


def together(n, method, parts, evaluates=True):
    torch.manual_seed(5)
    pipe = st.Pipeline(
        stages(n), sgd, nn.functional.cross_entropy, method, microbatches=parts, recompute=n == 2
    )
    return program(pipe, True, evaluates)


def apart(rank, ranks, cases):
    found = []
    for counts, method, parts, more in cases:
        k, _ = stage_and_replica(counts, rank)
        torch.manual_seed(5)
        pipe = st.DistributedPipeline(
            stages(len(counts))[k],
            sgd,
            nn.functional.cross_entropy,
            method,
            microbatches=parts,
            recompute=len(counts) == 2,
            timeout=30.0,
            replicas=counts,
            **more,
        )
        found.append(program(pipe, rank == 0))
    return found


def in_chunks(rank, ranks, chunks, method, parts):
    """Run ``program`` with several stages on each rank."""
    torch.manual_seed(5)
    pipe = st.DistributedPipeline(
        stages(chunks * ranks)[rank::ranks],
        sgd,
        nn.functional.cross_entropy,
        method,
        microbatches=parts,
        timeout=30.0,
    )
    return program(pipe, rank in (0, ranks - 1))


class Slow(nn.Module):
    """Waits, and records the time."""

    def __init__(self, seconds):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds
        self.times = []

    def forward(self, x):
        began = time.monotonic()
        time.sleep(self.seconds)
        self.times.append((began, time.monotonic()))
        return self.linear(x)


def slow(rank, ranks):
    """Return when this rank's stage evaluated, and whether its pipeline is freed afterwards."""
    stage = Slow(0.02)
    pipe = st.DistributedPipeline(stage, sgd, nn.functional.cross_entropy, timeout=30.0)
    pipe.evaluate(data([4] * 12))
    alive = weakref.ref(pipe)
    gc.collect()
    gc.disable()  # a reference cycle with all buffers would otherwise wait for it
    del pipe
    return stage.times, alive() is None


def failing(rank, ranks, what, where):
    """Return how an evaluation ends on every rank if one fails."""
    pipe = st.DistributedPipeline(
        stages(ranks)[rank], sgd, nn.functional.cross_entropy, timeout=20.0
    )

    def broken(*_):
        raise ValueError("broken here")

    batches, chosen = data([4] * 40), {"loss": nn.functional.cross_entropy}
    if what == "metric":
        chosen["mine"] = broken
    if what == "computed":
        chosen["mine"] = Broken()
    if rank == where and what == "stage":
        pipe.get_submodule(f"{rank}.0").register_forward_hook(broken)
    if rank == where and what == "batch":
        batches = map(lambda b: broken() if len(b[0]) == 5 else b, data([4, 4, 5]))
    try:
        pipe.evaluate(batches, chosen)
    except Exception as error:
        modes = {module.training for module in pipe.modules()}
        return type(error).__name__, str(error), modes
    return None


class Broken(Count):
    def compute(self):
        raise ValueError("broken here")


def refused(rank, ranks):
    """Return the errors of calls that leave the pipeline unchanged."""
    pipe = st.DistributedPipeline(
        stages(ranks)[rank], sgd, nn.functional.cross_entropy, timeout=20.0
    )
    batches = data([8] * 3)
    found = []

    def attempt(call):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")

    run = pipe.run(batches)
    next(run)
    attempt(lambda: pipe.evaluate(batches))
    attempt(lambda: pipe(batches[0][0]))
    attempt(lambda: pipe.fit(batches))
    for _ in run:
        pass
    attempt(lambda: pipe.evaluate([]))
    callbacks = [broken_at_1] if rank == 1 else []
    attempt(lambda: pipe.fit(batches, callbacks=callbacks))
    return found, pipe.evaluate(batches)


def broken_at_1(result):
    if result.index == 1:
        raise ValueError("enough")


def epochs(pipe, feeds):
    """Yield the batches of a loader with a random order, by epoch and run."""
    torch.manual_seed(7)
    order = torch.Generator().manual_seed(1)
    # The generator draws one more order when the loader is exhausted.
    loader = DataLoader(TensorDataset(*data([24])[0]), 6, shuffle=True, generator=order)
    given = loader if feeds else None
    found = [pipe.fit(given, 2), pipe.fit(given)]
    found += [pipe.evaluate(given) for _ in range(2)]
    found.append(len(list(pipe.run(given))))
    found.append(pipe.fit(given))
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    for result in pipe.run(given):  # the others' loaders are then not exhausted either
        if result.index == 1 and getattr(pipe, "rank", 0) == 0:
            break
    pipe.fit(given)
    return found, state


def epochs_together(n, method, parts):
    made, loss_fn = stages(n), nn.functional.cross_entropy
    torch.manual_seed(5)
    return epochs(st.Pipeline(made, sgd, loss_fn, method, microbatches=parts), True)


def epochs_apart(rank, ranks, cases):
    """Run ``epochs`` on this rank, with several stages if there are more than ranks."""
    found = []
    for counts, method, more in cases:
        n = len(counts)
        k = rank if n > ranks else stage_and_replica(counts, rank)[0]
        mine = stages(n)[rank::ranks] if n > ranks else stages(n)[k]
        torch.manual_seed(5)
        given = {"timeout": 30.0, **({} if n > ranks else {"replicas": counts}), **more}
        pipe = st.DistributedPipeline(mine, sgd, nn.functional.cross_entropy, method, **given)
        found.append(epochs(pipe, rank == 0))
    return found


def sharded(rank, ranks):
    """Return the errors for loaders that shard the samples, and the batches of one rank."""
    dataset = TensorDataset(*data([24])[0])
    found = []
    for stage, more in ((rank, {}), (0, {"replicas": 2})):
        loss_fn, given = nn.functional.cross_entropy, {"microbatches": 2, "timeout": 20.0, **more}
        pipe = st.DistributedPipeline(stages(2)[stage], sgd, loss_fn, **given)
        whole = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 1, 0))
        part = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, ranks, rank))
        calls = (pipe.run, pipe.fit, pipe.evaluate)
        for call in () if rank else calls:  # other ranks take no batches
            try:
                call(part)
            except ValueError as error:
                found.append(str(error))
        found.append(len(list(pipe.run(whole))))
    return found
