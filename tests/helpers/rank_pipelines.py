"""Pipelines that tests run in one process and on several ranks."""

from __future__ import annotations

import re
import signal
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, cycle
from time import sleep

import torch
import torch.distributed as dist
from helpers.foreign_optimizers import FOREIGN
from helpers.rank_programs import commit
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DataLoader, TensorDataset

import spectrain_ext as st
from spectrain_ext.distributed import board, connections, ends
from spectrain_ext.method import recipe_clip
from spectrain_ext.partitioning import cut_at
from spectrain_ext.partitioning.profile import BlockProfile
from spectrain_ext.timelines.timeline import write_trace

WIDTH = 6
RANGE = re.compile(r"[FBW]\d+|predict|send|recv|loss|update")


def stages(n):
    """Return the same stages on every rank: tuples, several dtypes, dropout, running statistics."""
    torch.manual_seed(3)
    return [Part(k, n) for k in range(n)]


def tied_stages(n, places):
    """Return these stages with one weight shared by the stages at ``places``."""
    made = stages(n)
    for k in places[1:]:
        made[k].linear.weight = made[places[0]].linear.weight
        made[k].tied_parameters = {"linear.weight": (places[0], "linear.weight")}
    return made


class Part(nn.Module):
    """Passes a tuple on: activations, some of them complex, and a value without a gradient."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = Centred() if k % 2 else nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.last = k == n - 1
        self.pairs = k % 2 == 1

    def forward(self, value):
        x, count = value if isinstance(value, tuple) else (value, torch.zeros(len(value)).long())
        if x.is_complex():
            x = torch.view_as_real(x).flatten(1)
        x = x + self.drop(torch.tanh(self.norm(self.linear(x))))
        if self.last:
            return x
        return (torch.view_as_complex(x.unflatten(1, (-1, 2))) if self.pairs else x), count + 1


class Centred(nn.Module):
    """Subtracts a running mean like a BatchNorm, for any number of samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def data(count, size=8, last=None):
    g = torch.Generator().manual_seed(11)
    sizes = [size] * count
    if last is not None:
        sizes[-1] = last
    return [(torch.randn(s, WIDTH, generator=g), torch.randn(s, WIDTH, generator=g)) for s in sizes]


def optimizer(params, smoothed=False):
    return st.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.01, smoothed=smoothed)


def scheduler(opt):
    return torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.7)


def settings_of(method, n):
    """Return the required options of a method."""
    parts = 2 if method in ("gpipe", "1f1b", "xpipe", "zb-h1-async") else 1
    if method in ("pipedream-2bw", "error-feedback", "zb-h1"):
        parts = n
    more = {"gpipe": {"clip_norm": 0.05}, "pipedream": {"clip_norm": 0.02}}
    more["spectrain"] = {"recompute": True}
    if method in ("interleaved", "interleaved-async", "wpipe"):
        parts = n // 2
    return {"microbatches": parts, "scheduler": scheduler, **more.get(method, {})}


def make_optimizer(method, foreign=None):
    if foreign is not None:
        return FOREIGN[foreign]
    return lambda params: optimizer(params, smoothed=method == "spectrain-smoothed")


def together(method, n, runs, foreign=None, places=()):
    """Return losses and final states of an in-process run; ``foreign`` names an optimizer."""
    torch.manual_seed(5)
    parts = tied_stages(n, places)
    torch.manual_seed(5)
    pipe = st.Pipeline(
        parts,
        make_optimizer(method, foreign),
        nn.functional.mse_loss,
        method,
        **settings_of(method, n),
    )
    losses = [[result.loss for result in pipe.run(data(*run))] for run in runs]
    return losses, [part.state_dict() for part in parts], [o.state_dict() for o in pipe.optimizers]


def apart(rank, ranks, methods, runs, foreign=None, places=(), chunks=1):
    """Return the same of this rank for each method; ``chunks``: its stages."""
    found = {}
    for method in methods:
        parts = tied_stages(chunks * ranks, places)[rank::ranks]
        torch.manual_seed(5)
        pipe = st.DistributedPipeline(
            parts if chunks > 1 else parts[0],
            make_optimizer(method, foreign),
            nn.functional.mse_loss,
            method,
            timeout=30.0,
            share_loss=method == "vanilla",
            **settings_of(method, chunks * ranks),
        )
        losses = []
        for run in runs:
            results = list(pipe.run(None if rank else data(*run)))
            assert [result.index for result in results] == list(range(run[0]))
            if rank == ranks - 1 or method == "vanilla":
                losses.append([result.loss for result in results])
            elif results:
                try:
                    _ = results[0].loss
                except RuntimeError as error:
                    losses.append(str(error))
        states = [part.state_dict() for part in parts]
        optimizers = [one.state_dict() for one in pipe.optimizers]
        found[method] = (
            (losses, states, optimizers) if chunks > 1 else (losses, *states, *optimizers)
        )
    return found


class Scaled(nn.Module):
    """Only elementwise operations and column sums: the same bits on a GPU every time."""

    def __init__(self, k):
        super().__init__()
        g = torch.Generator().manual_seed(k)
        self.scale = nn.Parameter(torch.randn(WIDTH, generator=g))
        self.shift = nn.Parameter(torch.randn(WIDTH, generator=g))

    def forward(self, x):
        return torch.tanh(x * self.scale + self.shift)


def scaled_apart(rank, ranks, replicas, method, device):
    """Return the backend of tensors, losses, and this rank's state; all ranks share one device."""
    stage = 0 if rank < replicas[0] else 1
    pipe = st.DistributedPipeline(
        Scaled(stage),
        optimizer,
        nn.functional.mse_loss,
        method,
        device=device,
        microbatches=2,
        timeout=60.0,
        replicas=replicas,
        share_loss=True,
    )
    losses = [result.loss.item() for result in pipe.run(data(9))]
    links = pipe._executor.connections.links
    link = links.edges[0]
    state = {name: t.cpu() for name, t in next(pipe.children()).state_dict().items()}
    return dist.get_backend(link.device), link.staged, losses, state


def scaled_together(method, device):
    pipe = st.Pipeline(
        [Scaled(0), Scaled(1)],
        optimizer,
        nn.functional.mse_loss,
        method,
        devices=[device, device],
        microbatches=2,
    )
    losses = [result.loss.item() for result in pipe.run(data(9))]
    return losses, [{name: t.cpu() for name, t in m.state_dict().items()} for m in pipe.children()]


def endless(rank, ranks, timeout, mark, after):
    """Train until stopped; open a FIFO when the test may stop it."""
    pipe = st.DistributedPipeline(
        stages(ranks)[rank], optimizer, nn.functional.mse_loss, "vanilla", timeout=timeout
    )
    for result in pipe.run(cycle(data(16))):
        if rank == ranks - 1 and result.index == after:
            with open(mark, "w"):
                pass


def traced(rank, ranks, folder):
    """Trace a run in which rank 1 computes only when the next message has arrived.

    Returns the names of the ranges in a profile, in order of their start.
    """
    pipe = small(rank, ranks, "spectrain")
    if rank == 1:
        inputs, changed = pipe._executor.connections.edges[rank].inputs[0], pipe._board.changed
        left = iter([True])  # in the first forward only

        def wait_for_next(*_):
            if next(left, False):
                with changed:
                    assert changed.wait_for(inputs.has, 30.0)

        next(pipe.children()).register_forward_pre_hook(wait_for_next)
    trace = st.Trace()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(pipe.run(data(6), trace=trace))
    write_trace(f"{folder}/{rank}.json", trace.spans(), microseconds=1e6, origin=trace.origin)
    profile.export_chrome_trace(f"{folder}/{rank}.profile.json")
    ranges = [event for event in profile.events() if RANGE.fullmatch(event.name)]
    return [event.name for event in sorted(ranges, key=lambda event: event.time_range.start)]


def versions_met(rank, ranks, method, chunks=1):
    """Return this rank's instructions in a traced run with their weight versions."""
    pipe, trace = small(rank, ranks, method, chunks=chunks), st.Trace()
    list(pipe.run(data(6), trace=trace))
    return [(*s[:2], str(s.kind), *s[3:5], *s[7:]) for s in trace.spans() if s.version is not None]


def small(rank, ranks, method="vanilla", make=optimizer, chunks=1, **settings):
    settings = {"timeout": 20.0, **settings}
    parts = stages(chunks * ranks)[rank::ranks]
    return st.DistributedPipeline(
        parts if chunks > 1 else parts[0], make, nn.functional.mse_loss, method, **settings
    )


def opening(rank, ranks, culprit, when):
    """Make one rank fail or hang before the others have connected or learned of its failure."""
    name = "backend_of_bodies" if when == "earlier" else "open_links"
    real = getattr(connections, name)

    def fails(*given):
        if when == "later":
            real(*given)
        commit("hang" if when == "hangs" else "exception")

    if rank == culprit:
        setattr(connections, name, fails)
    small(rank, ranks, timeout=4.0 if when == "hangs" else 20.0)


def missing(rank, ranks, culprit, late):
    """Leave one rank without its pipeline until the others have given up."""
    board.CONNECT_SECONDS = 5.0  # instead of 15
    if rank == culprit and not late:
        commit("hang")
    if rank == culprit:
        of_all = "-".join(map(str, range(ranks)))
        store = dist.PrefixStore(f"spectrain_ext/{of_all}/0", _get_default_store())
        store.wait(["failed"])
        while not store.get("failed"):
            sleep(0.1)
    small(rank, ranks, timeout=4.0)


def leaving_early(rank, ranks):
    """End rank 0, which keeps the store, before the others connect."""
    if rank == 0:
        small(rank, ranks, timeout=-1.0)
    with suppress(RuntimeError):
        while True:
            _get_default_store().check(["anything"])
    small(rank, ranks)


def leaving(rank, ranks, leaves, after, method="vanilla", chunks=1):
    """Leave the loop on one rank; return results seen here, and updates after each of two runs."""
    pipe = small(rank, ranks, method, chunks=chunks)
    opt = pipe.optimizers[-1]
    steps = [0]
    opt.register_step_post_hook(lambda *_: steps.__setitem__(-1, steps[-1] + 1))
    seen = 0
    run = pipe.run(data(30))
    for result in run:
        seen += 1
        if rank == leaves and result.index == after:
            break
    run.close()
    steps.append(steps[-1])
    list(pipe.run(data(4)))
    assert pipe.minibatches == steps[-1]
    return seen, steps


def left_together(n, after, method="vanilla"):
    """Return the minibatches that one process begins when it leaves the loop."""
    pipe = st.Pipeline(stages(n), optimizer, nn.functional.mse_loss, method)
    for result in pipe.run(data(30)):
        if result.index == after:
            break
    return pipe.minibatches


def disagreeing(rank, ranks):
    """Return the errors of arguments that differ between ranks."""
    found = {}

    def attempt(name, make):
        try:
            make()
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = str(error)

    attempt("method", lambda: small(rank, ranks, ["vanilla", "spectrain"][rank]))
    own = replace(st.spectrain(), forward_horizon=lambda place: place.stage + rank)
    attempt("horizon", lambda: small(rank, ranks, own))
    attempt("law", lambda: small(rank, ranks, st.spectrain(law=("linear", "geometric")[rank])))
    late = st.hybrid("sync", st.pipemare(updates=10 + rank))
    attempt("rates", lambda: small(rank, ranks, late, chunks=2))
    attempt("gap", lambda: small(rank, ranks, replace(st.hybrid(gap=0.1 + rank), name="hybrid")))
    clip = (recipe_clip, lambda place: 0.1)[rank]
    attempt("clip", lambda: small(rank, ranks, st.second_order(clip=clip)))
    attempt("microbatches", lambda: small(rank, ranks, microbatches=rank + 1))
    attempt("count", lambda: small(rank, ranks, count=(len, None)[rank]))
    attempt("codec", lambda: small(rank, ranks, codec=st.codecs.Int8(block=64 + rank)))
    makers = [optimizer, lambda params: None]
    attempt("optimizer", lambda: small(rank, ranks, make=makers[rank]))
    attempt("hidden", lambda: with_muon(rank, stages(ranks), stages(ranks)))
    with_muon(rank, whole := stages(ranks), whole)
    with_muon(rank, whole, whole[rank : rank + 1])
    for name, frozen in (("frozen", True), ("partly frozen", rank == 1)):
        stage, loss = nn.Linear(2, 2).requires_grad_(not frozen), nn.functional.mse_loss
        attempt(name, lambda s=stage, loss=loss: st.DistributedPipeline(s, optimizer, loss))
    pipe = small(rank, ranks)
    attempt("no batches", lambda: pipe.run())
    return found


def with_muon(rank, parts, known):
    """Make a pipeline whose optimizer gets the matrices of ``known`` stages."""
    hidden = [p for part in known for p in part.parameters() if p.dim() == 2]
    make = partial(st.optim.Muon, hidden=hidden)
    st.DistributedPipeline(parts[rank], make, nn.functional.mse_loss, timeout=20.0)


def refusing(rank, ranks):
    """Return the errors of invalid options with several stages on a rank."""
    found = {}

    def attempt(name, parts, **settings):
        try:
            st.DistributedPipeline(parts, optimizer, nn.functional.mse_loss, "vanilla", **settings)
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = str(error)

    four = stages(2 * ranks)[rank::ranks]
    attempt("replicas", four, replicas=2)
    attempt("numbers", four if rank == 0 else four[:1])
    attempt("none", [])
    attempt("again", [four[0], four[0]])
    four[1].linear.weight = nn.Parameter(torch.zeros(2, 2))
    four[1].tied_parameters = {"linear.weight": (rank, "linear.weight")}
    attempt("tied", four)
    return found


def of_a_cut(rank, ranks, method, order):
    """Return the error of a rank that takes every n-th stage of a cut, in that order."""
    parts = cut_at([nn.Linear(WIDTH, WIDTH) for _ in order], range(1, len(order) + 1))
    mine = [parts[order[k]] for k in range(rank, len(order), ranks)]
    try:
        st.DistributedPipeline(mine, optimizer, nn.functional.mse_loss, method)
    except ValueError as error:
        return str(error)
    return ""


def shuffled(seed, samples=40, batch=8):
    """Return a loader with a seeded order; the targets identify the inputs."""
    g = torch.Generator().manual_seed(11)
    x = torch.randn(samples, WIDTH, generator=g)
    order = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(x, x * 2), batch, shuffle=True, generator=order)


class Untouched:
    def __iter__(self):
        raise AssertionError("these batches are not wanted")


def feeding(rank, ranks):
    """Return the losses if ranks other than the first have unused batches or none."""
    found = {}
    for name, others in (("ignored", Untouched()), ("none", None)):
        results = list(small(rank, ranks).run(others if rank else shuffled(7)))
        last = rank == ranks - 1
        found[name] = [result.loss for result in results] if last else len(results)
    if last:
        alone = st.Pipeline(stages(ranks), optimizer, nn.functional.mse_loss, "vanilla")
        found["alone"] = [result.loss for result in alone.run(shuffled(7))]
    return found


def growing(rank, ranks, dynamic, chunks=1):
    """Return the sizes of the minibatches that arrived."""
    g = torch.Generator().manual_seed(0)
    sizes = [2, 5, 3, 9]
    made = [(torch.randn(n, WIDTH, generator=g), torch.randn(n, WIDTH, generator=g)) for n in sizes]
    pipe = small(rank, ranks, dynamic_shapes=dynamic, chunks=chunks)
    seen = []
    module = next(pipe.children())
    if rank:
        module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0][0])))
    list(pipe.run(made))
    return seen


class Faulty(nn.Module):
    """Behaves normally except in one forward or one backward."""

    def __init__(self, module, fault, where, when):
        super().__init__()
        self.module = module
        self.fault = fault
        self.where = where
        self.left = {"forward": when, "backward": when}
        self.left["backward" if where == "forward" else "forward"] = -1

    def at(self, where):
        self.left[where] -= 1
        if self.left[where] == -1 and self.where == where:
            commit(self.fault)

    def forward(self, value):
        self.at("forward")
        output = self.module(value)
        x = output[0] if isinstance(output, tuple) else output
        if x.requires_grad:  # the first forward of a recomputed stage has no graph
            x.register_hook(lambda gradient: self.at("backward"))
        if self.fault == "shape" and self.left["forward"] == -1:
            return (
                torch.cat([x, x], 1)
                if not isinstance(output, tuple)
                else (x.repeat(1, 2), output[1])
            )
        return output


def failing(rank, ranks, trial):
    """Run with one rank failing, in one of its stages if it has several."""
    tempfile.tempdir = trial.get("temporary", tempfile.tempdir)
    chunks = trial.get("chunks", 1)
    parts = stages(chunks * ranks)[rank::ranks]
    if rank == trial["culprit"]:
        n = trial.get("stage", rank) // ranks
        parts[n] = Faulty(parts[n], trial["fault"], trial["where"], trial["when"])
    method = trial["method"]
    pipe = st.DistributedPipeline(
        parts if chunks > 1 else parts[0],
        make_optimizer(method),
        nn.functional.mse_loss,
        method,
        timeout=trial["timeout"],
        **settings_of(method, chunks * ranks),
    )
    for _ in pipe.run(cycle(data(16))):
        pass


def failing_inside(rank, ranks, where):
    """Fail on rank 1 inside a call of gloo: in a signal handler, or in the receiving thread."""
    pipe, calls = small(rank, ranks), count()

    def killed(*_):  # as a DataLoader's handler, when one of its workers is killed
        raise RuntimeError("planned")

    signal.signal(signal.SIGUSR2, killed)
    receive, send = ends.RemoteReceiver._take, ends.RemoteSender._send

    def take(self):
        if rank == 1 and where == "thread" and next(calls) == 5:
            raise MemoryError("planned")
        return receive(self)

    def sent(self, *given):
        if rank == 1 and where == "handler" and next(calls) == 5:
            signal.raise_signal(signal.SIGUSR2)
        return send(self, *given)

    ends.RemoteReceiver._take, ends.RemoteSender._send = take, sent
    list(pipe.run(data(30)))


def measured(rank, ranks, path):
    pipe = small(rank, ranks)
    with st.Metrics(pipe, path, every=4) as metrics:
        for _ in pipe.run(data(9), trace=metrics):
            pass


class Connected(nn.Module):
    """Not a sequence: its end needs its first values and one of its inputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        first = self.first(x)
        return self.last(self.middle(first)) + first.sum(0) / x.size(0) * mask


def cut(rank, ranks):
    """Train a stage of a traced model; return its weights and its output in evaluation."""
    torch.manual_seed(3)
    batches = [((x, torch.ones_like(x)), y) for x, y in data(5, size=4, last=3)]
    profile = st.partitioning.Profile((BlockProfile(1.0),) * 3)
    points = ["middle", "last"]
    stages = st.partition(Connected(), 3, batches[0][0], split_points=points, profile=profile)
    loss_fn = nn.functional.mse_loss
    if ranks == 1:
        pipe = st.Pipeline(stages, optimizer, loss_fn, microbatches=1)
    else:
        pipe = st.DistributedPipeline(list(stages)[rank], optimizer, loss_fn, microbatches=1)
    for _ in pipe.run(batches):
        pass
    pipe.eval()
    values = [(torch.ones(2, WIDTH),) * count for count in (2, 2, 3)]
    found = []
    for stage, value in zip(pipe.children(), values[rank:], strict=False):
        with torch.no_grad():
            found.append((dict(stage.state_dict()), stage(value)))
    return found


def interrupted(rank, ranks, path, method, update):
    """Interrupt rank 1 in an update; it records whether its weights are the true ones."""
    pipe = small(rank, ranks, method)
    (opt,), (weights,) = pipe.optimizers, pipe._weights
    versions = []

    def note(*_):
        true = weights.true_weights()
        versions.append([true[p].clone() for p in weights.params])
        if rank == 1 and len(versions) == update:
            raise KeyboardInterrupt

    opt.register_step_post_hook(note)
    try:
        list(pipe.run(data(10)))
    except KeyboardInterrupt:
        found = pipe.state_dict()
        names = [name for name, _ in pipe.named_parameters()]
        same = all(torch.equal(found[n], w) for n, w in zip(names, versions[-1], strict=True))
        with open(path, "w") as file:
            file.write("true" if same else "predicted")
        raise


class Twice(nn.Module):
    """Not a sequence; uses one module twice, another one's weight, and a buffer in each stage."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.middle.weight
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x):
        for layer in (self.first, self.middle, self.last):
            x = torch.tanh(layer(x)) * self.scale
        return self.first(x)


def tied_and_cut(rank, ranks, folder):
    """Return two models' losses, and their states after training and resuming, by name."""

    def make(name):
        torch.manual_seed(3)
        if name == "sequence":
            layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
            layers[3].weight = layers[2].weight = layers[0].weight
            cut = st.partitioning.cut_at(layers, [1, 3, 4])
        else:
            profile = st.partitioning.Profile((BlockProfile(1.0),) * 3)
            points = ["middle", "last"]
            cut = st.partition(
                Twice(), 3, torch.zeros(2, WIDTH), split_points=points, profile=profile
            )
        loss_fn = nn.functional.mse_loss
        if ranks == 1:
            return st.Pipeline(cut, optimizer, loss_fn)
        return st.DistributedPipeline(list(cut)[rank], optimizer, loss_fn, timeout=30.0)

    def state(pipe):
        return {
            stage.full_name(key): value.clone()
            for stage in pipe.children()
            for key, value in stage.state_dict().items()
        }

    found = {}
    for name in ("sequence", "traced"):
        pipe, losses = make(name), []
        for result in pipe.run(data(5)):
            if rank == ranks - 1:
                losses.append(result.loss.item())
        st.checkpoint.save(f"{folder}/{name}", pipe)
        trained = state(pipe)
        other = make(name)
        for _ in other.run(data(2)):
            pass
        for buffer in other.buffers():
            buffer.zero_()
        st.checkpoint.load(f"{folder}/{name}", other)
        loaded = state(other)
        for _ in other.run(data(3)):
            pass
        found[name] = losses, trained, loaded, state(other)
        if name == "sequence":
            untied = {**state(other), "0.weight": torch.zeros(WIDTH, WIDTH)}
            try:
                other.load_state_dict(untied)
            except ValueError as error:
                assert "'0.weight' and '" in str(error), error
            else:  # this rank sees one of the names only
                assert rank == 0 < ranks - 1
    return found


def tied_small(rank, ranks, method="vanilla"):
    """Return a pipeline of this rank's stage; the last one has a weight of the first."""
    part = tied_stages(ranks, (0, ranks - 1))[rank]
    loss_fn = nn.functional.mse_loss
    return st.DistributedPipeline(part, optimizer, loss_fn, method, timeout=20.0)


def tied_in_steps(rank, ranks):
    """Leave a run on rank 0; return whether the copy has its home's weight, then and in a run."""
    pipe = tied_small(rank, ranks, method="spectrain")
    (module,) = pipe.children()
    run = pipe.run(data(30))
    for result in run:
        if rank == 0 and result.index == 4:
            break
    run.close()
    found = [module.linear.weight.clone()]
    for _ in pipe.run(data(0)):
        pass
    found.append(module.linear.weight.clone())
    pipe.release()
    for _ in pipe.run(data(5)):
        pass
    found.append(module.linear.weight.clone())
    assert module.linear.weight.grad is None
    return found


def tied_and_evaluated(rank, ranks, method="pipedream-2bw"):
    """Evaluate after a change of weights; one rank has a pipeline of 3 stages."""
    if ranks == 1:
        parts = tied_stages(3, (0, 2))
        pipe = st.Pipeline(parts, optimizer, nn.functional.mse_loss, method)
    else:
        pipe = tied_small(rank, ranks, method)
        parts = list(pipe.children())
    first, last = parts[0].linear.weight, parts[-1].linear.weight
    found = []

    def evaluate():
        found.append(pipe.evaluate(data(4))["loss"])

    if rank == ranks - 1 and ranks > 1:
        last.data.zero_()  # the first stage's weight counts
    evaluate()
    for way in (lambda: first.mul_(0.5), lambda: first.data.mul_(2.5)):
        for _ in pipe.run(data(5)):
            pass
        if rank == 0:
            with torch.no_grad():
                way()
        if len(found) == 1:
            last.grad = torch.ones_like(last)
        evaluate()
    with torch.inference_mode():
        evaluate()
    pipe.release()
    if rank == 0:
        first.data.mul_(0.5)
    evaluate()
    torch.manual_seed(3)
    output = pipe.eval()(data(1)[0][0])
    last = parts[-1].linear.weight.detach()  # after release() it may be another object
    return found, last, None if output is None else output.detach()


def tied_wrongly(rank, ranks):
    found = {}

    def attempt(name, stage, **settings):
        try:
            st.DistributedPipeline(
                stage, optimizer, nn.functional.mse_loss, "vanilla", timeout=20.0, **settings
            )
        except (ValueError, st.errors.RankError) as error:
            found[name] = str(error)

    def tie(name):
        made = nn.Linear(WIDTH, WIDTH)
        if rank == ranks - 1:
            made.tied_parameters = {"weight": (0, name)}
        return made

    attempt("missing", tie("wait"))
    attempt("shape", tie("bias"))
    attempt("own", tie("bias") if rank == ranks - 1 else nn.Linear(WIDTH, WIDTH, bias=False))
    attempt("replicas", tie("weight"), replicas=[2, 2], microbatches=2)
    return found


def tied_between_replicas(rank, ranks, replicas):
    """Return losses and this rank's state if stages between the two have replicas."""
    k = [k for k, count in enumerate(replicas) for _ in range(count)][rank]
    part = Scaled(k)
    if k == 2:
        part.scale = Scaled(0).scale
        part.tied_parameters = {"scale": (0, "scale")}
    pipe = st.DistributedPipeline(
        part,
        optimizer,
        nn.functional.mse_loss,
        "gpipe",
        replicas=replicas,
        microbatches=2,
        share_loss=True,
        timeout=20.0,
    )
    losses = [result.loss.item() for result in pipe.run(data(6))]
    if rank == 0:
        part.scale.data.mul_(2.0)
    losses.append(pipe.evaluate(data(5))["loss"])
    return losses, part.state_dict()


def tied_and_failing(rank, ranks, culprit):
    """Make one rank fail in its fourth forward."""
    pipe = tied_small(rank, ranks)
    (module,) = pipe.children()
    if rank == culprit:
        left = iter(range(4))

        def fail(*_):
            if next(left, None) is None:
                raise ArithmeticError("planned")

        module.register_forward_pre_hook(fail)
    for _ in pipe.run(cycle(data(16))):
        pass
