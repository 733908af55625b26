"""Tries changes that could bring two processes closer to the ideal (bench_distributed.py --trials).

Every trial is spectrain with one change, measured next to plain spectrain and the ideal in the same
rounds. Changes of the whole process (the memory that glibc keeps) are tried by pairs of processes
that take turns.
"""

from __future__ import annotations

import argparse
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from statistics import mean, median, quantiles
from typing import Any
from unittest.mock import patch

import bench_distributed as bench
import torch
import torch.distributed as dist
from heap import keep_freed_memory
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.distributed import connections
from spectrain_ext.distributed.links import Links, open_links
from spectrain_ext.schedule import Kind, streams
from spectrain_ext.simulation import Durations, simulate, summarize

IDLE_GROUPS = 16
#: Microbatches in flight on the two stages; (2, 1) is the classic window, (3, 1) the wide one.
WINDOWS = {"window 3, 1": [3, 1], "window 3, 2": [3, 2], "window 4, 2": [4, 2]}
Candidates = dict[str, Callable[[], bench.Measure]]


# A split backward: the gradient of the input first, those of the weights with the update

_Queue = list[tuple[nn.Linear, Tensor, Tensor]]


class _Late(torch.autograd.Function):
    """A linear layer's backward that computes only the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: _Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.layer.queue.append((ctx.layer, x, gradient))
        if not ctx.layer.late:
            run(ctx.layer.queue)
        return gradient.mm(weight), None, None, None


def run(queue: _Queue) -> None:
    """Compute the gradients of weights."""
    for layer, x, gradient in queue:
        layer.weight.grad = gradient.t().mm(x)
        layer.bias.grad = gradient.sum(0)
    queue.clear()


class _Linear(nn.Linear):
    def __init__(self, width: int, queue: _Queue, late: bool) -> None:
        super().__init__(width, width)
        self.queue, self.late = queue, late

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Late.apply(x, self.weight, self.bias, self)
        return result


def split_backward(blocks: int, batch: int, late: bool) -> bench.Measure:
    """Send the gradient of the last stage's input before computing those of its weights.

    With ``late=False`` the same functions compute everything in the backward.
    """
    queue: _Queue = []

    def stage(blocks: int) -> nn.Module:
        torch.manual_seed(0)
        layers = [m for _ in range(blocks) for m in (_Linear(bench.WIDTH, queue, late), nn.Tanh())]
        return nn.Sequential(*layers)

    def optimizer(params: Any) -> st.optim.SGD:
        made = bench.optimizer_of(params)
        made.register_step_pre_hook(lambda *_: run(queue))
        return made

    return bench.ours("spectrain", blocks, batch, stage=stage, optimizer=optimizer)


# Threads and their cores


def threads_of_gloo() -> Iterable[int]:
    """Return the ids of threads that Python did not start."""
    own = {thread.native_id for thread in threading.enumerate()}
    return [int(tid) for tid in os.listdir("/proc/self/task") if int(tid) not in own]


@contextmanager
def placed(threads: Iterable[int], cores: set[int]) -> Any:
    """Pin these threads to these cores inside the block."""
    before = {tid: os.sched_getaffinity(tid) for tid in threads}
    for tid in before:
        os.sched_setaffinity(tid, cores)
    yield
    for tid, were in before.items():
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(tid, were)


def pinned(measure: bench.Measure, what: str, core: int) -> bench.Measure:
    """Pin the whole rank or its own thread to its core, or gloo's threads to the other's."""

    def measured(count: int) -> float:
        own = [threading.get_native_id()]
        with ExitStack() as held:
            if what in ("rank", "own"):  # threads started later inherit the cores
                held.enter_context(placed(own, {core}))
            if what in ("rank", "other"):
                cores = {core} if what == "rank" else {1 - core}
                held.enter_context(placed(threads_of_gloo(), cores))
            return measure(count)

    return measured


def beside_idle_groups(blocks: int, batch: int) -> bench.Measure:
    """Measure spectrain with additional unused gloo groups."""
    for _ in range(IDLE_GROUPS):
        dist.new_group([0, 1])
    return bench.ours("spectrain", blocks, batch)


def sent_by_threads(blocks: int, batch: int) -> bench.Measure:
    """Measure spectrain with a separate sending thread, which needs an additional copy."""

    def links(*arguments: Any, **options: Any) -> Links:
        made = open_links(*arguments, **options)
        return made._replace(edges=[link._replace(staged=True) for link in made.edges])

    with patch.object(connections, "open_links", links):
        return bench.ours("spectrain", blocks, batch)


def trial_candidates(rank: int, blocks: int, batch: int) -> Candidates:
    plain = partial(bench.ours, "spectrain", blocks, batch)
    ideal = partial(bench.ideal, blocks, batch)
    return {
        "ideal": ideal,
        "vanilla": partial(bench.ours, "vanilla", blocks, batch),
        "spectrain": plain,
        "the ideal with a core for each rank": lambda: pinned(ideal(), "rank", rank),
        **{name: partial(plain, window=window) for name, window in WINDOWS.items()},
        "a core for each rank": lambda: pinned(plain(), "rank", rank),
        "a core for each rank's own thread": lambda: pinned(plain(), "own", rank),
        "gloo's threads on the other core": lambda: pinned(plain(), "other", rank),
        f"{IDLE_GROUPS} more idle groups": partial(beside_idle_groups, blocks, batch),
        "split backward": partial(split_backward, blocks, batch, True),
        "split backward, all at once": partial(split_backward, blocks, batch, False),
        "messages sent by a thread": partial(sent_by_threads, blocks, batch),
    }


def heap_candidates(blocks: int, batch: int) -> Candidates:
    return {
        "ideal": partial(bench.ideal, blocks, batch),
        "vanilla": partial(bench.ours, "vanilla", blocks, batch),
        "spectrain": partial(bench.ours, "spectrain", blocks, batch),
        "pipedream": partial(bench.ours, "pipedream", blocks, batch),
    }


# Where a minibatch's time goes


class _Counters(st.Trace):
    """A Trace with the kernel's counters of each thread between two results."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self._at = first, last
        self.found: list[tuple[float, int, dict[int, tuple[float, float]]]] = []

    def result(self, result: Any) -> None:
        if result.index in self._at:
            self.found.append(_counted())


def _counted() -> tuple[float, int, dict[int, tuple[float, float]]]:
    """Return the time, page faults, and each thread's seconds of running and waiting for a core."""
    threads = {}
    for tid in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{tid}/schedstat") as file:
                ran, waited, _ = map(int, file.read().split())
        except OSError:
            continue
        threads[int(tid)] = ran / 1e9, waited / 1e9
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    return time.perf_counter(), faults, threads


def profile(
    method: str, blocks: int, batch: int, count: int, pipes: list[st.Pipeline]
) -> dict[str, Any]:
    """Return a minibatch's milliseconds by thread and action; append the pipeline to ``pipes``."""
    warm = 4
    pipe = st.DistributedPipeline(
        bench.stage_of(blocks),
        bench.optimizer_of,
        nn.functional.mse_loss,
        method,
        microbatches=1,
        timeout=120.0,
        share_loss=True,
    )
    pipes.append(pipe)
    torch.manual_seed(0)
    data = torch.randn(batch, bench.WIDTH), torch.randn(batch, bench.WIDTH)
    counters = _Counters(warm - 1, warm + count - 1)
    for _ in pipe.run((data for _ in range(warm + count)), trace=counters):
        pass
    (start, faults, before), (end, faults_after, after) = counters.found
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    own = threading.get_native_id()
    spent = {"own": 0.0, "gloo": 0.0, "other threads of Python": 0.0}
    for tid, (ran, _) in after.items():
        whose = "own" if tid == own else "gloo"
        if tid != own and tid in names:
            whose = "other threads of Python"
        spent[whose] += ran - before.get(tid, (0.0, 0.0))[0]
    waited = after[own][1] - before[own][1]
    actions: dict[str, float] = {}
    for span in counters.spans():
        if warm <= span.minibatch < warm + count:
            actions[span.kind.name] = actions.get(span.kind.name, 0.0) + span.end - span.start
    per = 1e3 / count
    return {
        "period": (end - start) * per,
        "cpu": {name: seconds * per for name, seconds in spent.items()},
        "waited for a core": waited * per,
        "waited for a message": (end - start - spent["own"] - waited) * per,
        "page faults": (faults_after - faults) / count,
        "actions": {name: seconds * per for name, seconds in actions.items()},
    }


def profile_ideal(blocks: int, batch: int, count: int) -> dict[str, Any]:
    """Profile a stage alone."""
    module, x = bench.stage_of(blocks), torch.randn(batch, bench.WIDTH)
    bench.alone(module, x, 0.1, True)
    own = threading.get_native_id()
    _, faults, before = _counted()
    times = bench.alone(module, x, count * 0.02, True)
    _, faults_after, after = _counted()
    return {
        "period": mean(times) * 1e3,
        "cpu": {"own": (after[own][0] - before[own][0]) * 1e3 / len(times)},
        "page faults": (faults_after - faults) / len(times),
    }


# The ranks, and the report of their results


def rank_main(
    rank: int,
    ranks: int,
    port: int,
    blocks: int | None,
    kept: bool,
    said: Any,
    options: argparse.Namespace,
) -> None:
    bench.begin(rank, ranks, port)
    if kept:
        keep_freed_memory()
    if blocks is None:
        blocks = bench.calibrated(options.milliseconds, options.batch)
    batch, count = options.batch, options.count
    if options.heap:
        # Once, as in a training: glibc would otherwise keep as much memory as large buffers freed
        # earlier.
        made = {name: make() for name, make in heap_candidates(blocks, batch).items()}
        found = {name: partial(measure, count) for name, measure in made.items()}
    else:
        found = bench.each_anew(trial_candidates(rank, blocks, batch), count)
    figures = bench.rounds_of(found, options)
    pipes: list[st.Pipeline] = []  # kept, for the same reason
    profiles = {"ideal": profile_ideal(blocks, options.batch, 2 * options.count)}
    for method in ("vanilla", "spectrain"):
        dist.barrier()
        profiles[method] = profile(method, blocks, options.batch, 2 * options.count, pipes)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, profiles)
    if rank == 0:
        said.put(
            {
                "blocks": blocks,
                "load": os.getloadavg(),
                "microbatches_per_second": figures,
                "profiles": everyone,
            }
        )
    bench.end()


def simulated(profiles: list[dict[str, Any]]) -> dict[str, float]:
    """Return throughput relative to the classic window, with the mean durations of a run.

    Constant durations cause no waiting: the simulation shows what a trial could gain if forwards
    and backwards did not vary.
    """
    actions = [rank["spectrain"]["actions"] for rank in profiles]

    def of(*kinds: Kind) -> list[float]:
        return [sum(rank.get(kind.name, 0.0) for kind in kinds) for rank in actions]

    def period(windows: list[int], early: float = 0.0) -> float:
        backward, update = of(Kind.BACKWARD, Kind.SEND_GRADIENT), of(Kind.UPDATE)
        backward[1], update[1] = backward[1] - early, update[1] + early
        durations = Durations.of(
            2,
            forward=of(Kind.FORWARD, Kind.LOSS, Kind.SEND_ACTIVATION),
            backward=backward,
            update=update,
            load_forward=of(Kind.LOAD_FORWARD),
            load_backward=of(Kind.LOAD_BACKWARD),
        )
        made = streams("1f1b-async", windows)
        return summarize(simulate(made, durations, minibatches=120)).period

    classic = period([2, 1])
    found = {name: classic / period(window) for name, window in WINDOWS.items()}
    return {**found, "split backward": classic / period([2, 1], of(Kind.BACKWARD)[1] / 2)}


def report(figures: dict[str, list[float]]) -> None:
    """Print medians of the rounds' ratios, and their quartiles."""
    print("| | of the ideal | against spectrain | quartiles |")
    print("|---|---|---|---|")
    for name, values in figures.items():
        ideal, plain = (
            [value / other for value, other in zip(values, figures[of], strict=True)]
            for of in ("ideal", "spectrain")
        )
        low, _, high = quantiles(plain, n=4) if len(plain) > 1 else [plain[0]] * 3
        print(f"| {name} | {median(ideal):.1%} | {median(plain):.3f} | {low:.3f} to {high:.3f} |")


def trials(options: argparse.Namespace) -> dict[str, Any]:
    """Run all trials and return them as written."""
    turns = 1 if options.quick else 3  # pairs of processes with each of the two heaps
    part = argparse.Namespace(**vars(options))
    part.heap, part.seconds, part.rounds = True, options.seconds / 24, options.rounds
    rest = argparse.Namespace(**vars(part))
    rest.heap, rest.seconds = False, options.seconds * 3 / 4
    blocks, heaps = None, {"as glibc does": [], "kept": []}
    for _ in range(turns):
        for name, kept in (("as glibc does", False), ("kept", True)):
            found = bench.spawned(rank_main, 2, blocks, kept, part)
            blocks = found["blocks"]
            heaps[name].append(found)
    main = bench.spawned(rank_main, 2, blocks, True, rest)
    report(main["microbatches_per_second"])
    return {
        "options": bench.settings_of(options),
        **main,
        "simulated": simulated(main["profiles"]),
        "heaps": heaps,
    }
