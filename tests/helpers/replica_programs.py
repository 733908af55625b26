"""Pipelines with replicas that tests run on several ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools

import torch
import torch.distributed as dist
from helpers.rank_pipelines import Faulty
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spectrain_ext as st
from spectrain_ext.distributed import collectives
from spectrain_ext.schedule import Kind

WIDTH = 5
RUNS = [(6, 12, 5), (4, 12, 3)]  # minibatches, samples of each, samples of the last
mse = nn.functional.mse_loss


def stages(n, layers=1):
    torch.manual_seed(3)
    return [
        nn.Sequential(
            *(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH).double(), nn.Tanh()))
        )
        for _ in range(n)
    ]


def data(count, size=8, last=None):
    g = torch.Generator().manual_seed(11)
    sizes = [size] * (count - 1) + [size if last is None else last]
    return [
        tuple(torch.randn(s, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
        for s in sizes
    ]


def sgd(params, smoothed=False):
    return st.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.01, smoothed=smoothed)


def averaging(params):
    return sgd(params, smoothed=True)


def steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)


def stage_and_replica(counts, rank):
    """(stage, replica) of a rank, counted directly."""
    return [(k, c) for k, r in enumerate(counts) for c in range(r)][rank]


def make(rank, counts, method="vanilla", optimizer=sgd, part=None, **settings):
    if part is None:
        part = stages(len(counts))[stage_and_replica(counts, rank)[0]]
    settings = {"timeout": 30.0, "replicas": counts, **settings}
    loss_fn = settings.pop("loss_fn", mse)
    return st.DistributedPipeline(part, optimizer, loss_fn, method, **settings)


def trained(rank, ranks, cases):
    """Return losses if any, the stage's weights and the optimizer's momentum for each case."""
    found = []
    for counts, method, settings in cases:
        optimizer = averaging if method == "spectrain-smoothed" else sgd
        pipe = make(rank, counts, method, optimizer, scheduler=steps, **settings)
        losses = []
        for run in RUNS:
            results = list(pipe.run(None if rank else data(*run)))
            assert [result.index for result in results] == list(range(run[0]))
            with contextlib.suppress(RuntimeError):
                losses.append([result.loss.item() for result in results])
        state = pipe.state_dict()
        found.append((losses, state, pipe.optimizers[0].state_dict()["state"]))
    return found


WORDS, IGNORED = 7, -100


def words(k):
    """Return stage ``k`` of two of a model of words."""
    torch.manual_seed(5 + k)
    parts = [(nn.Embedding(WORDS, WIDTH), nn.Tanh()), (nn.Linear(WIDTH, WORDS),)][k]
    return nn.Sequential(*parts).double()


def sentences(count=5):
    """Return batches of eight rows of 1 to 12 words, some without the first or last rows."""
    g = torch.Generator().manual_seed(3)
    for i in range(count):
        ids, labels = torch.randint(WORDS, (2, 8, 12), generator=g).unbind()
        lengths = torch.randint(1, 13, (8,), generator=g)
        labels[torch.arange(12)[None] >= lengths[:, None]] = IGNORED
        if i % 2:
            labels[slice(6, 8) if i == 1 else slice(0, 3)] = IGNORED
        yield ids, labels


def counting(labels):
    return (labels != IGNORED).sum()


def total_and_count(output, labels):
    total = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, counting(labels)


def counted(rank, ranks, cases):
    """Return losses if any, means of an epoch and an evaluation, and weights for each case."""
    found = []
    for counts, method, settings in cases:
        part = words(stage_and_replica(counts, rank)[0])
        settings = {"timeout": 30.0, "replicas": counts, **settings}
        pipe = st.DistributedPipeline(part, sgd, total_and_count, method, **settings)
        losses = [
            result.loss.item() if result.has_loss else None
            for result in pipe.run(None if rank else sentences())
        ]
        epoch = pipe.fit(None if rank else list(sentences(3)))
        evaluated = pipe.evaluate(None if rank else list(sentences(2)))
        found.append((losses, epoch, evaluated, pipe.state_dict()))
    return found


def sharded(rank, ranks):
    """Return losses and weights for each way to update a replicated stage."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second to import

    found = []
    for way in ("whole", "sharded", "sharded narrow", "whole narrow"):

        def optimizer(params, way=way):
            more = {"lr": 0.03, "weight_decay": 0.1}
            if way.startswith("sharded"):
                return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **more)
            made = torch.optim.AdamW(params, **more)
            made.param_groups[0]["called"] = lambda: 0  # its text differs between ranks
            return made

        settings = {"microbatches": 4, "clip_norm": 0.05}
        pieces = data(6)
        part = stages(1, layers=2)[0]
        if way.endswith("narrow"):
            part = part.bfloat16()
            pieces = [(x.bfloat16(), y.bfloat16()) for x, y in pieces]
            settings["master_dtype"] = torch.float32
        pipe = make(rank, [ranks], optimizer=optimizer, part=part, **settings)
        losses = [result.loss.item() for result in pipe.run(pieces)]
        entries = pipe.optimizers[0].state  # of its shard
        held = len(entries) if way.startswith("whole") else len(pipe.optimizers[0].optim.state)
        found.append((losses, pipe.state_dict(), held))
    return found


def leaving(rank, ranks, counts, leaves, after):
    """Leave the loop on one rank; return results seen here, and updates after each of two runs."""
    pipe = make(rank, counts, microbatches=2)
    made = [0]
    pipe.optimizers[0].register_step_post_hook(lambda *_: made.__setitem__(-1, made[-1] + 1))
    seen = 0
    run = pipe.run(data(20))
    for result in run:
        seen += 1
        if rank == leaves and result.index == after:
            break
    run.close()
    made.append(made[-1])
    list(pipe.run(data(3)))
    return seen, made, pipe.state_dict()


def refused(rank, ranks):
    """Return the errors of invalid arguments, on four ranks."""
    found = {}

    def attempt(name, call):
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    for name, replicas in (("sum", [2, 1]), ("division", 3), ("zero", [4, 0]), ("type", "22")):
        attempt(name, lambda asked=replicas: make(rank, [4], replicas=asked, microbatches=4))
    attempt("dealt", lambda: make(rank, [1, 3], microbatches=4))
    attempt("window", lambda: make(rank, [1, 3], window=2, microbatches=3))
    attempt("entry", lambda: make(rank, [1, 3], "pipedream-vertical-sync", microbatches=3))
    attempt("stale", lambda: make(rank, [2, 2], "dc-asgd", microbatches=4))
    attempt("unlike", lambda: make(rank, [[1, 3], [3, 1]][rank % 2], microbatches=3))

    def changed(by):
        part = stages(2)[rank // 2]
        if rank == by:
            with torch.no_grad():
                part[0].bias[1] += 1e-9
        return part

    attempt("weights", lambda: make(rank, [2, 2], part=changed(3), microbatches=2))

    def other_rate(params):
        return st.optim.SGD(params, lr=0.03 if rank else 0.04)

    attempt("options", lambda: make(rank, [2, 2], optimizer=other_rate, microbatches=2))
    return found


def too_small(rank, ranks):
    """Run with a last minibatch that is too small for two replicas."""
    list(make(rank, [1, 2], microbatches=2).run(data(3, 8, 1)))


def failing(rank, ranks, trial):
    counts = trial["counts"]
    part = stages(len(counts))[stage_and_replica(counts, rank)[0]]
    if rank == trial["culprit"]:
        part = Faulty(part, trial["fault"], trial["where"], trial["when"])
    else:  # the same names everywhere
        part = Faulty(part, None, "forward", -1)
    settings = {"microbatches": 6, "timeout": trial["timeout"]}
    pipe = make(rank, counts, trial["method"], part=part, **settings)
    for _ in pipe.run(itertools.cycle(data(16))):
        pass


def overlap(rank, ranks):
    """Return the order of a backward and its buckets' all-reduces in one minibatch."""
    collectives.LEAST_BYTES = 1
    events = []
    part = stages(1, layers=6)[0]
    pipe = make(rank, [2], part=part, microbatches=4)
    for k, p in enumerate(part.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, k=k: events.append(("gradient", k)))
    pipe.optimizers[0].register_step_pre_hook(lambda *_: events.append(("step", None)))
    all_reduce = dist.all_reduce

    def noted(tensor, **more):
        events.append(("sum", tensor.dtype == torch.float64 and tensor.numel()))
        return all_reduce(tensor, **more)

    dist.all_reduce = noted
    try:
        list(pipe.run(data(1)))
    finally:
        dist.all_reduce = all_reduce
    return events


class Choosy(nn.Module):
    """Has a parameter that some microbatches use, and one that none uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.sometimes = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x)
        return y * self.sometimes if x[0, 0] > 0 else y


def plain(rank, ranks):
    """Return losses and traced updates of a stage without parameters and with two replicas."""
    parts = [*stages(1), nn.Tanh(), *stages(1)]
    pipe = make(
        rank, [1, 2, 1], "sync", part=parts[[0, 1, 1, 2][rank]], microbatches=4, share_loss=True
    )
    trace = st.Trace()
    losses = [result.loss.item() for result in pipe.run(data(3), trace=trace)]
    spans = [(s.stage, s.minibatch, s.microbatch) for s in trace.spans() if s.kind is Kind.FORWARD]
    return losses, spans


def choosy(rank, ranks):
    """Return weights, updates of a sometimes used parameter, and those of bfloat16 with masters."""
    part = Choosy()
    list(make(rank, [2], "gpipe", part=part, microbatches=2).run(data(9)))
    narrow = stages(1, layers=2)[0].to(torch.bfloat16)
    pipe = make(rank, [2], part=narrow, optimizer=sgd, microbatches=2, master_dtype=torch.float32)
    before = copy.deepcopy(narrow.state_dict())
    list(pipe.run((x.bfloat16(), y.bfloat16()) for x, y in data(6)))
    masters = [pipe.masters()[p].clone() for p in narrow.parameters()]
    moved = [not torch.equal(before[key], p) for key, p in narrow.state_dict().items()]
    return part.state_dict(), masters, moved


def against_ddp(rank, ranks):
    """Compare one stage with two replicas with DDP on half the batch each; return both weights."""
    module = stages(1, layers=3)[0]
    replicated = DistributedDataParallel(copy.deepcopy(module))
    optimizer = torch.optim.SGD(replicated.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, y in data(12):
        half = slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        loss = mse(replicated(x[half]), y[half])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    pipe = make(
        rank,
        [2],
        "sync",
        lambda params: st.optim.SGD(params, lr=0.05, momentum=0.9),
        part=module,
        microbatches=2,
    )
    own = [result.loss.item() for result in pipe.run(data(12))]
    return losses, own, list(replicated.module.parameters()), list(module.parameters())


def sharded_checkpoint(rank, ranks, path):
    """Return losses after a checkpoint of a sharded optimizer: of its writer and its reader."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def pipe():
        return make(
            rank,
            [ranks],
            optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.03),
            part=stages(1, layers=2)[0],
            microbatches=2,
        )

    kept, other = pipe(), pipe()
    pieces = data(7)
    list(kept.run(pieces[:3]))
    kept.optimizers[0].consolidate_state_dict()  # on rank 0, which saves
    st.checkpoint.save(path, kept)
    st.checkpoint.load(path, other)
    return [[r.loss.item() for r in each.run(pieces[3:])] for each in (kept, other)]


def averaged(rank, ranks, cases, path):
    """Return losses, own weights, the averages and an evaluation for each case, and a checkpoint's.

    For a checkpoint: the losses of a third run, and of another pipeline that loaded it; own weights
    after both; and the averages that a model and a pipeline without averaging loaded.
    """
    found = []
    for number, (counts, method, averaging, settings) in enumerate(cases):
        stage = stage_and_replica(counts, rank)[0]
        feeds = stage in (0, len(counts) - 1)

        def run(pipe, kind, feeds=feeds):
            return [r.loss.item() for r in pipe.run(data(*kind) if feeds else None)]

        def made(counts=counts, method=method, more=(averaging, settings)):
            own, settings = more
            return make(
                *(rank, counts, method), scheduler=steps, averaging=own, share_loss=True, **settings
            )

        pipe = made()
        losses = [run(pipe, kind) for kind in RUNS]
        own = row(pipe)
        with pipe.averaged():
            average = row(pipe)
        value = pipe.evaluate(data(3) if feeds else None)["loss"]
        assert torch.equal(row(pipe), own)
        where = f"{path}/{number}"
        st.checkpoint.save(where, pipe, minibatches=10)
        third = run(pipe, (4, 12, 12))
        other = made()
        run(other, (2, 12, 12))  # overwritten by the checkpoint
        st.checkpoint.load(where, other)
        again = run(other, (4, 12, 12))
        ends = [row(pipe), row(other)]
        plain = made(more=(None, settings))
        st.checkpoint.load(where, plain)
        st.checkpoint.load(where, other, only_model=True)
        model = nn.Sequential(*stages(len(counts)))
        st.checkpoint.load(where, model)
        loaded = [row(plain), row(other), row(model[stage])]
        found.append((losses, own, average, value, (third, again), ends, loaded))
    return found


def row(module):
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def bad_averaging(rank, ranks):
    """Return the errors of invalid averaging, and of ranks with different averaging."""
    reasons = []
    for settings in (
        {"counts": [1] * ranks},
        {"counts": [1, ranks - 1]},
        {"counts": [ranks], "clip_scope": "global", "clip_norm": 1.0, "method": "sync"},
        {"counts": [ranks], "averaging": st.averaging.Elastic(0.1 * (1 + rank))},
    ):
        settings = {"averaging": st.averaging.Elastic(0.5), "microbatches": 4, **settings}
        counts = settings.pop("counts")
        try:
            make(rank, counts, settings.pop("method", "vanilla"), **settings)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    return reasons


def failing_replica(rank, ranks):
    """Make rank 1 fail in its third minibatch while the other waits for its weights."""
    calls = []

    def loss(value, target):
        calls.append(0)
        if rank == 1 and len(calls) == 3:
            raise ArithmeticError("odd")
        return mse(value, target)

    pipe = st.DistributedPipeline(
        stages(1)[0],
        *(sgd, loss, "sync"),
        replicas=ranks,
        microbatches=ranks,
        averaging=st.averaging.Elastic(0.5),
        timeout=20.0,
    )
    try:
        list(pipe.run(data(9)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
