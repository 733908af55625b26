"""Measures the throughput of two to four gloo processes against the ideal and other libraries.

All stages are equal. Everything is measured in one run, in rounds: every candidate once per round,
and the medians count. Figures are microbatches per second. Asynchronous methods update after each
microbatch, synchronous ones after M of them, and so does spectrain with M microbatches per
minibatch. The model is the same for all numbers of ranks, cut into as many equal stages.
Data-parallel training (one stage with replicas, and DistributedDataParallel) has the whole model on
every rank; its ideal is the same.

The ideal is a stage that never waits and updates after every microbatch, without prediction, on all
ranks at once. With more ranks than cores, the ranks share cores: the ideal is then the limit of the
cores and says nothing about machines with one core per rank.

Every round makes each candidate anew and destroys its groups afterwards: a gloo thread polls a
hundred times per second, whether its group is in use or not.

    python bench/bench_distributed.py --ranks 2 3 4 --rounds 9 --seconds 480 --json measured.json
    python bench/bench_distributed.py --ranks 2 3 4 --quick      # a rehearsal: no figures
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from heap import keep_freed_memory
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import spectrain_ext as st

WIDTH = 256
METHODS = ("vanilla", "spectrain", "pipedream")
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
#: A note printed next to the figures.
SHARED = (
    "{ranks} ranks on {cores} cores: the ideal is a stage alone on all ranks at once, without "
    "messages and prediction, with an update per microbatch; with more ranks than cores it is what "
    "the shared cores can do at most"
)
_mse = nn.functional.mse_loss

#: Runs a number of microbatches and returns microbatches per second.
Measure = Callable[[int], float]
Candidates = dict[str, Callable[[], Measure]]


def microbatches(ranks: int) -> tuple[int, ...]:
    """Return the microbatches per minibatch of methods that update after several."""
    return (2, 4, 8, 16) if ranks == 2 else (ranks, 2 * ranks)


def stage_of(blocks: int) -> nn.Sequential:
    """Return the same stage on all ranks; tanh, since dead units decay into subnormals."""
    torch.manual_seed(0)
    layers = [m for _ in range(blocks) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def optimizer_of(params: Any) -> st.optim.SGD:
    return st.optim.SGD(params, lr=1e-3, momentum=0.9)


def alone(module: nn.Module, x: Tensor, seconds: float, update: bool) -> list[float]:
    """Return seconds of each forward, backward and update, with all processes active at once."""
    optimizer = optimizer_of(module.parameters())
    leaf = x.clone().requires_grad_()
    times = []
    dist.barrier()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        module(leaf).square().mean().backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        leaf.grad = None
        times.append(time.perf_counter() - start)
    return times


def calibrated(milliseconds: float, batch: int) -> int:
    """Return the blocks for a forward and backward of ``milliseconds``, the same on all ranks."""
    x = torch.randn(batch, WIDTH)
    # The minimum: on a disturbed machine the stage would become too small.
    per_block = min(alone(stage_of(8), x, 1.0, False)) / 8
    blocks = torch.tensor(float(max(1, round(milliseconds / 1e3 / per_block))))
    dist.all_reduce(blocks, op=dist.ReduceOp.MAX)
    return int(blocks)


def ideal(blocks: int, batch: int) -> Measure:
    """Return microbatches per second of the slowest rank."""
    module, x = stage_of(blocks), torch.randn(batch, WIDTH)
    return lambda count: 1 / slowest(mean(alone(module, x, count * 0.02, True)))


def ours(
    method: str,
    blocks: int,
    batch: int,
    parts: int = 1,
    window: Literal["classic", "wide"] | None = None,
) -> Measure:
    """Return microbatches per second of a run, between its first and last results."""
    pipe = st.DistributedPipeline(
        stage_of(blocks),
        optimizer_of,
        _mse,
        method,
        microbatches=parts,
        window=window,
        timeout=120.0,
        passes=[st.passes.ShareLoss()],
    )
    return throughput_of(pipe, batch, parts)


def throughput_of(pipe: st.Pipeline, batch: int, parts: int) -> Measure:
    """Return a function that measures a pipeline in minibatches of ``parts`` microbatches."""
    torch.manual_seed(0)  # the same on all ranks
    data = torch.randn(batch * parts, WIDTH), torch.randn(batch * parts, WIDTH)

    def measure(count: int) -> float:
        warm, steps = warm_and_measured(count, parts)
        start = 0.0
        for result in pipe.run(data for _ in range(steps + warm)):
            if result.index == warm - 1:
                start = time.perf_counter()
            elif result.index == steps + warm - 1:
                return steps * parts / (time.perf_counter() - start)
        raise AssertionError("a run yields every minibatch")

    return measure


def warm_and_measured(count: int, parts: int) -> tuple[int, int]:
    """Return minibatches for warm-up and measurement."""
    return (4 if parts == 1 else 2), max(1, count // parts)


def theirs(rank: int, ranks: int, kind: Any, blocks: int, batch: int, parts: int) -> Measure:
    """Measure a schedule of torch.distributed.pipelining, with an update per step."""
    module = stage_of(blocks)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = kind(stage, parts, loss_fn=_mse)
    optimizer = optimizer_of(module.parameters())
    x, y = torch.randn(batch * parts, WIDTH), torch.randn(batch * parts, WIDTH)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        elif rank < ranks - 1:
            schedule.step()
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        optimizer.zero_grad()

    return stepped(step, parts)


def stepped(step: Callable[[], None], parts: int) -> Measure:
    """Return a function that measures a step of ``parts`` microbatches."""

    def measure(count: int) -> float:
        warm, steps = warm_and_measured(count, parts)
        for _ in range(warm):
            step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        return steps * parts / (time.perf_counter() - start)

    return measure


def whole_of(blocks: int, stages: int = 2) -> nn.Sequential:
    """Return all stages as one module, the model of a data-parallel rank."""
    return nn.Sequential(*(stage_of(blocks) for _ in range(stages)))


def replicated(ranks: int, blocks: int, batch: int, parts: int) -> Measure:
    """Measure one stage with replicas, with an update per minibatch."""
    pipe = st.DistributedPipeline(
        whole_of(blocks, ranks),
        optimizer_of,
        _mse,
        "sync",
        timeout=120.0,
        replicas=ranks,
        microbatches=parts,
    )
    return throughput_of(pipe, batch, parts)


def data_parallel(ranks: int, blocks: int, batch: int, parts: int) -> Measure:
    """Measure DistributedDataParallel, which sums gradients in the last backward only.

    The warm-up puts its buckets into the order of the first backward.
    """
    module = DistributedDataParallel(whole_of(blocks, ranks))
    optimizer = optimizer_of(module.parameters())
    own = max(1, parts // ranks)
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)

    def step() -> None:
        for j in range(own):
            with module.no_sync() if j < own - 1 else nullcontext():
                (_mse(module(x), y) / own).backward()
        optimizer.step()
        optimizer.zero_grad()

    return stepped(step, parts)


def candidates(rank: int, ranks: int, blocks: int, batch: int, count: int) -> Candidates:
    """Return the factories of all candidates that fill a minibatch with ``count`` microbatches."""
    found: Candidates = {
        "ideal": partial(ideal, blocks, batch),
        **{method: partial(ours, method, blocks, batch) for method in METHODS},
        "spectrain, wide window": partial(ours, "spectrain", blocks, batch, window="wide"),
    }
    sizes = [parts for parts in microbatches(ranks) if parts <= count]
    for parts in sizes:
        for method in ("auto", "spectrain"):
            found[f"{method}, M = {parts}"] = partial(ours, method, blocks, batch, parts)
        for name, kind in SCHEDULES.items():
            if parts <= 2 * ranks:
                found[f"{name}, M = {parts}"] = partial(ours, name.lower(), blocks, batch, parts)
            found[f"torch {name}, M = {parts}"] = partial(
                theirs, rank, ranks, kind, blocks, batch, parts
            )
    for parts in sizes[:3]:
        found[f"replicas, M = {parts}"] = partial(replicated, ranks, blocks, batch, parts)
        found[f"DDP, M = {parts}"] = partial(data_parallel, ranks, blocks, batch, parts)
    return found


def measured_once(make: Callable[[], Measure], count: int) -> float:
    """Return a candidate's figure and destroy the candidate."""
    before = set(distributed_c10d._world.pg_map)
    figure = make()(count)
    gc.collect()
    dist.barrier()
    for group in [each for each in distributed_c10d._world.pg_map if each not in before]:
        dist.destroy_process_group(group)
    return figure


def rank_main(
    rank: int, ranks: int, port: int, blocks: int | None, said: Any, options: argparse.Namespace
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    gc.freeze()
    # For all candidates: how much memory glibc returns depends on the process's history.
    keep_freed_memory()
    if blocks is None:
        blocks = calibrated(options.milliseconds * 2 / ranks, options.batch)
    found = candidates(rank, ranks, blocks, options.batch, options.count)
    seconds = slowest(
        median(alone(stage_of(blocks), torch.randn(options.batch, WIDTH), 2.0, False))
    )
    figures = rounds_of(found, options)
    if rank == ranks - 1:
        said.put(
            {
                "note": SHARED.format(ranks=ranks, cores=os.cpu_count()),
                "blocks": blocks,
                "seconds": seconds,
                "load": os.getloadavg(),
                "torch": torch.__version__,
                "options": {name: value for name, value in vars(options).items() if name != "json"},
                "microbatches_per_second": figures,
            }
        )
    gc.unfreeze()
    dist.barrier()
    dist.destroy_process_group()


def rounds_of(found: Candidates, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the figures of all rounds that fit into the time, at least one."""
    figures: dict[str, list[float]] = {name: [] for name in found}
    start = time.perf_counter()
    for n in range(options.rounds):
        if n and slowest(time.perf_counter() - start) * (n + 1) / n > options.seconds:
            break
        for name, make in found.items():
            dist.barrier()
            figures[name].append(measured_once(make, options.count))
    return figures


def slowest(seconds: float) -> float:
    """Return the maximum over ranks: a pipeline is as fast as its slowest stage."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def spawned(main: Callable[..., None], ranks: int, *arguments: Any) -> Any:
    """Run ``main`` on all ranks; return one rank's result."""
    said = mp.get_context("spawn").Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = mp.spawn(
        main, (ranks, store.port, *arguments[:-1], said, arguments[-1]), nprocs=ranks, join=False
    )
    while not running.join(timeout=0.2):
        if not said.empty():
            break
    found = said.get(timeout=60.0)
    while not running.join():
        pass
    return found


def report(ranks: int, document: dict[str, Any]) -> None:
    """Print medians, and ratios taken round by round, since a disturbance affects a whole round."""
    figures = document["microbatches_per_second"]
    print(
        f"{ranks} stages of {document['blocks']} blocks, {document['seconds'] * 1e3:.1f} ms per "
        f"forward and backward, {len(figures['ideal'])} rounds of {document['options']['count']} "
        f"microbatches, load {document['load'][0]:.1f} on {os.cpu_count()} cores"
    )
    print(
        "| | microbatches/s | of the ideal | spectrain against it | with as many updates "
        "| vanilla against it |"
    )
    print("|---|---|---|---|---|---|")
    for name, values in figures.items():

        def ratio(above: str, below: list[float] = values) -> float:
            return median(a / b for a, b in zip(figures[above], below, strict=True))

        same = f"spectrain, M = {name.rpartition('M = ')[2]}"
        print(
            f"| {name} | {median(values):.1f} | {1 / ratio('ideal'):.1%} | "
            f"{ratio('spectrain'):.2f} | {f'{ratio(same):.2f}' if same in figures else ''} | "
            f"{ratio('vanilla'):.2f} |"
        )


def about() -> dict[str, Any]:
    """Return where and how a run was made."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    # not the output file, which is a path of some machine
    given = ["FILE" if word.endswith(".json") else word for word in sys.argv[1:]]
    return {
        "command": shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *given]),
        "date": date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "spectrain_ext": st.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes")
    parser.add_argument(
        "--milliseconds",
        type=float,
        default=20.0,
        help="forward and backward of half the model",
    )
    parser.add_argument("--batch", type=int, default=64, help="samples per microbatch")
    parser.add_argument(
        "--count", type=int, default=32, help="microbatches per round and candidate"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds at most")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="seconds for all rounds"
    )
    parser.add_argument("--quick", action="store_true", help="a rehearsal without valid figures")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    if options.quick:
        options.milliseconds, options.count, options.rounds = 2.0, max(options.ranks), 1
    document = {**about(), "ranks": {}}
    blocks: int | None = None
    parts = sum(len(microbatches(ranks)) for ranks in options.ranks)
    for at, ranks in enumerate(options.ranks, start=1):
        own = argparse.Namespace(**vars(options))
        own.seconds = options.seconds * len(microbatches(ranks)) / parts
        found = spawned(rank_main, ranks, blocks, own)
        document["ranks"][str(ranks)] = found
        if at == 1:
            whole = found["blocks"] * ranks
        blocks = None if at == len(options.ranks) else max(1, round(whole / options.ranks[at]))
        report(ranks, found)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rounded(document), file, indent=1)
            file.write("\n")


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if value not in (float("inf"), float("-inf")) else None
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    sys.exit(main())
