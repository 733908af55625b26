"""Two, three and four processes, equal stages, gloo: throughput against the ideal and rivals.

Everything is measured in one run, in rounds: every candidate once in every round; medians count.
A figure is microbatches per second. Asynchronous methods make an update after each microbatch,
synchronous ones after M of them; so does spectrain with M microbatches per minibatch. The model is
the same for all numbers of ranks, cut into as many equal stages. Data parallel training, as one
stage with replicas and by DistributedDataParallel, has all of it on every rank: what it can reach
at best is the same.

The ideal is a stage that waits for nobody and makes an update per microbatch, without prediction,
on all ranks at once. Where there are more ranks than cores, these are shared: it is then what the
cores can do at most, and says nothing of machines that have a core for each.

Each candidate is made anew in every round, and its groups are taken apart after it: a thread of
gloo looks around a hundred times a second, whether its group is used or not.

    python bench/bench_distributed.py --ranks 2 3 4 --rounds 9 --seconds 480 --json measured.json
    python bench/bench_distributed.py --trials --rounds 60 --seconds 400 --json trials.json
    python bench/bench_distributed.py --ranks 2 3 4 --quick      # whether it works: no figures
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
#: What is said of the figures beside them.
SHARED = (
    "{ranks} ranks on {cores} cores: the ideal is a stage alone on all ranks at once, without "
    "messages and prediction, with an update per microbatch; with more ranks than cores it is what "
    "the shared cores can do at most"
)
_mse = nn.functional.mse_loss

#: Measures so many microbatches, and says how many there were in a second.
Measure = Callable[[int], float]


def microbatches(ranks: int) -> tuple[int, ...]:
    """Per minibatch, of what updates after several of them."""
    return (2, 4, 8, 16) if ranks == 2 else (ranks, 2 * ranks)


def stage_of(blocks: int) -> nn.Sequential:
    """The same on all ranks; tanh, since units that are always off decay into subnormals."""
    torch.manual_seed(0)
    layers = [m for _ in range(blocks) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def optimizer_of(params: Any) -> st.optim.SGD:
    return st.optim.SGD(params, lr=1e-3, momentum=0.9)


def alone(module: nn.Module, x: Tensor, seconds: float, update: bool) -> list[float]:
    """Seconds of each forward, backward and update of a stage, all processes at it at once."""
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
    """Blocks for a forward and backward of so many milliseconds, the same on all ranks."""
    x = torch.randn(batch, WIDTH)
    # The least: a machine that is disturbed would give a stage that is too small.
    per_block = min(alone(stage_of(8), x, 1.0, False)) / 8
    blocks = torch.tensor(float(max(1, round(milliseconds / 1e3 / per_block))))
    dist.all_reduce(blocks, op=dist.ReduceOp.MAX)
    return int(blocks)


def ideal(blocks: int, batch: int) -> Measure:
    """Microbatches per second of the slowest rank."""
    module, x = stage_of(blocks), torch.randn(batch, WIDTH)
    return lambda count: 1 / slowest(mean(alone(module, x, count * 0.02, True)))


def ours(
    method: str | st.Method,
    blocks: int,
    batch: int,
    parts: int = 1,
    window: Literal["classic", "wide"] | list[int] | None = None,
    stage: Callable[[int], nn.Module] = stage_of,
    optimizer: Callable[[Any], st.optim.SGD] = optimizer_of,
) -> Measure:
    """Microbatches per second of a run, between the first results and the last one."""
    pipe = st.DistributedPipeline(
        stage(blocks),
        optimizer,
        _mse,
        method,
        microbatches=parts,
        window=window,
        timeout=120.0,
        share_loss=True,
    )
    return throughput_of(pipe, batch, parts)


def throughput_of(pipe: st.Pipeline, batch: int, parts: int) -> Measure:
    """What measures a pipeline, in minibatches of so many microbatches."""
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
    """Minibatches."""
    return (4 if parts == 1 else 2), max(1, count // parts)


def theirs(rank: int, ranks: int, kind: Any, blocks: int, batch: int, parts: int) -> Measure:
    """The same of a schedule of torch.distributed.pipelining, with an update per step."""
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
    """What measures a step of so many microbatches."""

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
    """All stages as one module: what a rank has in data parallel training."""
    return nn.Sequential(*(stage_of(blocks) for _ in range(stages)))


def replicated(ranks: int, blocks: int, batch: int, parts: int) -> Measure:
    """Microbatches per second of one stage with replicas, with an update per minibatch."""
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
    """The same of DistributedDataParallel, which sums gradients in the last backward only.

    Its buckets are put into the order of the first backward by what warms up.
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


def candidates(rank: int, ranks: int, blocks: int, batch: int) -> dict[str, Callable[[], Measure]]:
    """What makes each of those that are compared."""
    found: dict[str, Callable[[], Measure]] = {
        "ideal": partial(ideal, blocks, batch),
        **{method: partial(ours, method, blocks, batch) for method in METHODS},
        "spectrain, wide window": partial(ours, "spectrain", blocks, batch, window="wide"),
    }
    for parts in microbatches(ranks):
        for method in ("auto", "spectrain"):
            found[f"{method}, M = {parts}"] = partial(ours, method, blocks, batch, parts)
        for name, kind in SCHEDULES.items():
            if parts <= 2 * ranks:
                found[f"{name}, M = {parts}"] = partial(ours, name.lower(), blocks, batch, parts)
            found[f"torch {name}, M = {parts}"] = partial(
                theirs, rank, ranks, kind, blocks, batch, parts
            )
    for parts in microbatches(ranks)[:3]:
        found[f"replicas, M = {parts}"] = partial(replicated, ranks, blocks, batch, parts)
        found[f"DDP, M = {parts}"] = partial(data_parallel, ranks, blocks, batch, parts)
    return found


def measured_once(make: Callable[[], Measure], count: int) -> float:
    """A candidate's figure; nothing of it stays."""
    before = set(distributed_c10d._world.pg_map)
    figure = make()(count)
    gc.collect()
    dist.barrier()
    for group in [each for each in distributed_c10d._world.pg_map if each not in before]:
        dist.destroy_process_group(group)
    return figure


def each_anew(
    found: dict[str, Callable[[], Measure]], count: int
) -> dict[str, Callable[[], float]]:
    """Candidates to be made anew whenever they are measured."""
    return {name: partial(measured_once, make, count) for name, make in found.items()}


def begin(rank: int, ranks: int, port: int) -> None:
    """Put a rank's process in order."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    gc.freeze()


def end() -> None:
    """Leave it as it was."""
    gc.unfreeze()
    dist.barrier()
    dist.destroy_process_group()


def rank_main(
    rank: int, ranks: int, port: int, blocks: int | None, said: Any, options: argparse.Namespace
) -> None:
    begin(rank, ranks, port)
    # For all candidates alike: how much glibc gives back depends on what the process did before.
    keep_freed_memory()
    if blocks is None:
        blocks = calibrated(options.milliseconds * 2 / ranks, options.batch)
    found = candidates(rank, ranks, blocks, options.batch)
    seconds = slowest(
        median(alone(stage_of(blocks), torch.randn(options.batch, WIDTH), 2.0, False))
    )
    figures = rounds_of(each_anew(found, options.count), options)
    if rank == ranks - 1:
        said.put(
            {
                "note": SHARED.format(ranks=ranks, cores=os.cpu_count()),
                "blocks": blocks,
                "seconds": seconds,
                "load": os.getloadavg(),
                "torch": torch.__version__,
                "options": settings_of(options),
                "microbatches_per_second": figures,
            }
        )
    end()


def rounds_of(
    found: dict[str, Callable[[], float]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """The figures of all rounds, as many as there is time for, and one at least."""
    figures: dict[str, list[float]] = {name: [] for name in found}
    start = time.perf_counter()
    for n in range(options.rounds):
        if n and slowest(time.perf_counter() - start) * (n + 1) / n > options.seconds:
            break
        for name, measure in found.items():
            dist.barrier()
            figures[name].append(measure())
    return figures


def slowest(seconds: float) -> float:
    """The largest of all ranks' figures: a pipeline is as fast as its slowest stage."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def spawned(main: Callable[..., None], ranks: int, *arguments: Any) -> Any:
    """Run it on so many ranks; returns what one of them says."""
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
    """Medians, and ratios taken round by round, since what disturbs a round disturbs all of it."""
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


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a run depended on: not where its figures went."""
    return {name: value for name, value in vars(options).items() if name != "json"}


def about() -> dict[str, Any]:
    """Where and how a run was made."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    # not where its figures went, which is a path of some machine
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
        "--trials", action="store_true", help="two ranks: what could bring them nearer to the ideal"
    )
    parser.add_argument(
        "--milliseconds",
        type=float,
        default=20.0,
        help="per forward and backward of half the model",
    )
    parser.add_argument("--batch", type=int, default=64, help="samples per microbatch")
    parser.add_argument(
        "--count", type=int, default=32, help="microbatches per round and candidate"
    )
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="of all rounds together"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a rehearsal, whose figures say nothing"
    )
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    if options.quick:
        options.milliseconds, options.count, options.rounds = 2.0, 4, 1
    if options.trials:
        from distributed_trials import trials

        document = {**about(), **trials(options)}
    else:
        document = {**about(), "ranks": {}}
        blocks: int | None = None
        parts = sum(len(microbatches(ranks)) for ranks in options.ranks)
        for ranks in options.ranks:
            own = argparse.Namespace(**vars(options))
            own.seconds = options.seconds * len(microbatches(ranks)) / parts
            found = spawned(rank_main, ranks, blocks, own)
            document["ranks"][str(ranks)] = found
            if len(document["ranks"]) == 1:
                whole = found["blocks"] * ranks
            at = options.ranks.index(ranks) + 1
            blocks = None if at == len(options.ranks) else max(1, round(whole / options.ranks[at]))
            report(ranks, found)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rounded(document), file, indent=1)
            file.write("\n")


def rounded(value: Any) -> Any:
    """Figures to five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value not in (float("inf"), float("-inf")) else None
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    sys.exit(main())
