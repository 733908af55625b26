"""Two processes, two equal stages, gloo: throughput against the ideal and torch's own schedules.

Everything is measured in one run, in rounds: every candidate once in every round; medians count.
A figure is microbatches per second. Asynchronous methods make an update after each microbatch,
synchronous ones after M of them; so does spectrain with M microbatches per minibatch. Data parallel
training, as one stage with two replicas and by DistributedDataParallel, has both stages on both
ranks: what it can reach at best is the same.

    python bench/bench_distributed.py --milliseconds 20 --rounds 5 --json run.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from statistics import mean, median
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import spectrain_ext as st

WIDTH = 256
MICROBATCHES = (2, 4, 8, 16)
METHODS = ("vanilla", "spectrain", "pipedream")
_mse = nn.functional.mse_loss


def stage_of(blocks: int) -> nn.Sequential:
    """The same on both ranks; tanh, since units that are always off decay into subnormals."""
    torch.manual_seed(0)
    layers = [m for _ in range(blocks) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def optimizer_of(params: Any) -> st.optim.SGD:
    return st.optim.SGD(params, lr=1e-3, momentum=0.9)


def alone(module: nn.Module, x: Tensor, seconds: float, update: bool) -> list[float]:
    """Seconds of each forward, backward and update of a stage, both processes at it at once."""
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
    """Blocks for a forward and backward of so many milliseconds, the same on both ranks."""
    x = torch.randn(batch, WIDTH)
    # The least: a machine that is disturbed would give a stage that is too small.
    per_block = min(alone(stage_of(8), x, 1.0, False)) / 8
    blocks = torch.tensor(float(max(1, round(milliseconds / 1e3 / per_block))))
    dist.all_reduce(blocks, op=dist.ReduceOp.MAX)
    return int(blocks)


def ours(
    method: str,
    blocks: int,
    batch: int,
    parts: int = 1,
    window: Literal["classic", "wide"] = "classic",
) -> Callable[[int], float]:
    """Microbatches per second of a run, between the first results and the last one."""
    pipe = st.DistributedPipeline(
        stage_of(blocks),
        optimizer_of,
        _mse,
        method,
        microbatches=parts,
        window=window,
        timeout=120.0,
        share_loss=True,
    )
    return throughput_of(pipe, batch, parts)


def throughput_of(pipe: st.Pipeline, batch: int, parts: int) -> Callable[[int], float]:
    """What measures a pipeline, in minibatches of so many microbatches."""
    torch.manual_seed(0)  # the same on both ranks
    data = torch.randn(batch * parts, WIDTH), torch.randn(batch * parts, WIDTH)

    def measure(count: int) -> float:
        warm, steps = (4 if parts == 1 else 2), max(1, count // parts)
        start = 0.0
        for result in pipe.run(data for _ in range(steps + warm)):
            if result.index == warm - 1:
                start = time.perf_counter()
            elif result.index == steps + warm - 1:
                return steps * parts / (time.perf_counter() - start)
        raise AssertionError("a run yields every minibatch")

    return measure


def theirs(rank: int, kind: Any, blocks: int, batch: int, parts: int) -> Callable[[int], float]:
    """The same of a schedule of torch.distributed.pipelining, with an update per step."""
    module = stage_of(blocks)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = kind(stage, parts, loss_fn=_mse)
    optimizer = optimizer_of(module.parameters())
    x, y = torch.randn(batch * parts, WIDTH), torch.randn(batch * parts, WIDTH)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        optimizer.zero_grad()

    step()

    def measure(count: int) -> float:
        steps = max(1, count // parts)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        return steps * parts / (time.perf_counter() - start)

    return measure


def whole_of(blocks: int) -> nn.Sequential:
    """Both stages as one module: what a rank has in data parallel training."""
    return nn.Sequential(stage_of(blocks), stage_of(blocks))


def replicated(blocks: int, batch: int, parts: int) -> Callable[[int], float]:
    """Microbatches per second of one stage with two replicas, with an update per minibatch."""
    pipe = st.DistributedPipeline(
        whole_of(blocks), optimizer_of, _mse, "sync", timeout=120.0, replicas=2, microbatches=parts
    )
    return throughput_of(pipe, batch, parts)


def data_parallel(blocks: int, batch: int, parts: int) -> Callable[[int], float]:
    """The same of DistributedDataParallel, which sums gradients in the last backward only."""
    module = DistributedDataParallel(whole_of(blocks))
    optimizer = optimizer_of(module.parameters())
    own = max(1, parts // 2)
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)

    def step() -> None:
        for j in range(own):
            with module.no_sync() if j < own - 1 else nullcontext():
                (_mse(module(x), y) / own).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()  # which puts its buckets into the order of the first backward

    def measure(count: int) -> float:
        steps = max(1, count // parts)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        return steps * parts / (time.perf_counter() - start)

    return measure


def rank_main(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5)
    )
    blocks = calibrated(options.milliseconds, options.batch)
    x = torch.randn(options.batch, WIDTH)
    module = stage_of(blocks)
    candidates: dict[str, Callable[[int], float]] = {
        "ideal": lambda count: 1 / slowest(mean(alone(module, x, count * 0.02, True))),
        **{method: ours(method, blocks, options.batch) for method in METHODS},
        "spectrain, wide window": ours("spectrain", blocks, options.batch, window="wide"),
    }
    for parts in MICROBATCHES:
        candidates[f"spectrain, M = {parts}"] = ours("spectrain", blocks, options.batch, parts)
        for kind in (Schedule1F1B, ScheduleGPipe):
            name = f"torch {kind.__name__.removeprefix('Schedule')}, M = {parts}"
            candidates[name] = theirs(rank, kind, blocks, options.batch, parts)
    for parts in MICROBATCHES[:3:2]:
        candidates[f"replicas, M = {parts}"] = replicated(blocks, options.batch, parts)
        candidates[f"DDP, M = {parts}"] = data_parallel(blocks, options.batch, parts)
    seconds = slowest(median(alone(module, x, 2.0, False)))
    figures: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(options.rounds):
        for name, measure in candidates.items():
            dist.barrier()
            figures[name].append(measure(options.count))
    if rank == 1:
        report(figures, blocks, seconds, options)
    dist.barrier()
    dist.destroy_process_group()


def slowest(seconds: float) -> float:
    """The larger of both ranks' figures: a pipeline is as fast as its slowest stage."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def report(
    figures: dict[str, list[float]], blocks: int, seconds: float, options: argparse.Namespace
) -> None:
    """Medians, and ratios taken round by round, since what disturbs a round disturbs all of it."""
    print(
        f"two stages of {blocks} blocks, {seconds * 1e3:.1f} ms per forward and backward, "
        f"{options.rounds} rounds of {options.count} microbatches, load {os.getloadavg()[0]:.1f} "
        f"on {os.cpu_count()} cores"
    )
    print(
        "| | microbatches/s | of the ideal | spectrain against it | with as many updates "
        "| vanilla against it |"
    )
    print("|---|---|---|---|---|---|")
    for name, values in figures.items():

        def ratio(above: str, below: list[float] = values) -> float:
            return median(a / b for a, b in zip(figures[above], below, strict=True))

        ideal = 1 / ratio("ideal")
        same = f"spectrain, M = {name.rpartition('M = ')[2]}"
        print(
            f"| {name} | {median(values):.1f} | {ideal:.1%} | "
            f"{ratio('spectrain'):.2f} | {f'{ratio(same):.2f}' if same in figures else ''} | "
            f"{ratio('vanilla'):.2f} |"
        )
    if options.json:
        about = {
            "blocks": blocks,
            "seconds": seconds,
            "load": os.getloadavg(),
            "torch": torch.__version__,
            "options": settings_of(options),
        }
        with open(options.json, "w") as file:
            json.dump({**about, "microbatches_per_second": figures}, file)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a run depended on: not where its figures went."""
    return {name: value for name, value in vars(options).items() if name != "json"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--milliseconds", type=float, default=20.0, help="per forward and backward")
    parser.add_argument("--batch", type=int, default=64, help="samples per microbatch")
    parser.add_argument(
        "--count", type=int, default=64, help="microbatches per round and candidate"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(rank_main, (store.port, options), nprocs=2)


if __name__ == "__main__":
    sys.exit(main())
