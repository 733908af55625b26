"""Measures seconds to a loss in two to four processes whose links are slow (`inbound_wires.py`).

Every candidate really trains: the character transformer of `studies slow-links` in float32, one
sequence of minibatches for all, with AdamW at the candidate's own learning rate (factors of two,
found with one seed, without a pipeline). A minibatch is new text throughout, so the mean loss of
the last 25 is a test loss. The goal is what `1f1b` with bfloat16 messages reaches at 80 % of its
updates. `1f1b`, `zb-h1` and torch's schedules use the number of microbatches with the least seconds
per update, which does not change their updates; the others use one per rank.

Sleeping wires occupy no core. With more ranks than cores, what ranks compute takes longer than on
as many machines, for all candidates alike; the seconds that ranks compute are in the file.

    python bench/bench_slow_links.py --data-dir tinyshakespeare.txt --out runs/wires

Every run is a file in --out: the same command resumes. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import root  # noqa: F401  before studies
import torch
import torch.distributed as dist
from bench_distributed import join_group, spawned
from inbound_wires import InboundWires
from rivals.machine import environment, save
from table import table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

import spectrain_ext as st
from spectrain_ext.tools.planning import Link
from studies.settings import settle
from studies.slow_links import SETTINGS, TEXT, step_over_wires
from studies.study import Cell, maker_in, search
from studies.workload import Batch, Workload, epochs_of, mean_loss

BF16 = "bfloat16"
CODECS = (BF16, "int4-hadamard")
FLUSHES = ("1f1b", "zb-h1")
METHODS = (*FLUSHES, "vanilla", "auto")
TORCH = {"torch 1F1B": Schedule1F1B, "torch ZBV": ScheduleZBVZeroBubble}
SMOOTHED = 25  # minibatches
SHARE = 0.8
PACE = 27  # minibatches to choose a number of microbatches by


class Run(NamedTuple):
    """One training in so many processes."""

    name: str
    ranks: int
    microbatches: int
    codec: str
    lr: float
    updates: int
    seed: int = 0

    @property
    def flushes(self) -> bool:
        return self.name in (*FLUSHES, *TORCH)

    @property
    def file(self) -> str:
        words = (self.name.replace(" ", "-"), f"N{self.ranks}", f"M{self.microbatches}", self.codec)
        return "-".join((*words, f"{self.updates}", f"seed{self.seed}")) + ".json"


def cell_of(method: str, ranks: int, codec: str, options: argparse.Namespace) -> Cell:
    """Return the training of `studies study` whose updates a run makes."""
    asked = {**TEXT, **SETTINGS["adamw"], "data_dir": options.data_dir, "codec": codec}
    flushes = method in FLUSHES
    asked |= {"stages": ranks, "microbatches": 1 if flushes else ranks, "methods": ["sync"]}
    return Cell("sync" if flushes else method, settle(asked), options.updates, 1.0)


# In each process


class _Edges16(nn.Module):
    """A stage whose messages are bfloat16, for schedules that have no codec."""

    def __init__(self, module: nn.Module, last: bool) -> None:
        super().__init__()
        self.module, self.last = module, last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x.float() if x.is_floating_point() else x)
        return y if self.last else y.to(torch.bfloat16)


#: Trains on a minibatch and returns its loss on the rank that knows it.
Step = Callable[[Tensor, Tensor], float | None]


def step_of_torch(run: Run, rank: int, make: Callable[[int], Workload]) -> Step:
    """Return a step of one of torch's schedules; ZBV has two stages on every rank."""
    chunks = 1 if run.name == "torch 1F1B" else 2
    total = run.ranks * chunks
    mine = [rank, total - 1 - rank][:chunks]
    workload = make(total)
    modules = {k: _Edges16(workload.model[k], k == total - 1) for k in mine}
    stages = [PipelineStage(modules[k], k, total, torch.device("cpu")) for k in mine]
    kind: Any = TORCH[run.name]
    schedule = kind(stages[0] if chunks == 1 else stages, run.microbatches, loss_fn=mean_loss)
    params = [p for module in modules.values() for p in module.parameters()]
    optimizer = workload.optimizer(params)
    assert workload.scheduler is not None
    scheduler = workload.scheduler(optimizer)
    has_loss = total - 1 in mine

    def step(value: Tensor, target: Tensor) -> float | None:
        losses: list[Tensor] = []
        given = (value,) if 0 in mine else ()
        schedule.step(*given, **({"target": target, "losses": losses} if has_loss else {}))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return fmean(each.item() for each in losses) if has_loss else None

    return step


def _results(
    run: Run, rank: int, make: Callable[[int], Workload], batches: Iterator[Batch]
) -> Iterator[float | None]:
    """Train; yield the loss of each minibatch on the rank that knows it."""
    if run.name in TORCH:
        step = step_of_torch(run, rank, make)
        yield from (step(*batch) for batch in batches)
        return
    workload = make(run.ranks)
    pipe = st.DistributedPipeline(
        workload.model[rank],
        workload.optimizer,
        workload.loss,
        run.name,
        scheduler=workload.scheduler,
        microbatches=run.microbatches,
        passes=[st.passes.Compress(st.codecs.NAMES[run.codec])],
        timeout=120.0,
    )
    for result in pipe.run(batches):
        yield result.loss.item() if rank == run.ranks - 1 else None
    pipe.release()


def rank_main(
    rank: int, ranks: int, port: int, path: str, run: Run, said: Any, options: argparse.Namespace
) -> None:
    join_group(rank, ranks, port)
    settings = replace(
        cell_of("1f1b", ranks, run.codec, options).with_rate(run.lr), updates=options.updates
    )
    make_workload = maker_in(settings, Path(options.out))

    def make(stages: int) -> Workload:
        wanted = replace(settings, stages=stages)
        return make_workload(wanted, st.method.find_method("sync"), stages, run.seed)

    batches = islice(epochs_of(make(ranks).train, 1000), run.updates)
    wires = InboundWires(Path(path), rank, ranks, options.megabits * 1e6 / 8, options.latency / 1e3)
    over = wires.between_stages_of_torch if run.name in TORCH else wires.between_ranks
    losses, moments = [], []
    dist.barrier()
    began, computed = time.perf_counter(), time.process_time()
    with over():
        for loss in _results(run, rank, make, batches):
            losses.append(loss)
            moments.append(time.perf_counter() - began)
    mine = {
        "losses": None if losses[-1] is None else losses,
        "moments": moments,
        "computed": time.process_time() - computed,
        "waited": wires.waited,
        "bytes": wires.bytes,
        "messages": wires.messages,
    }
    _said_by(path, rank).write_text(json.dumps(mine))
    dist.barrier()
    if rank == 0:
        said.put(True)
    dist.destroy_process_group()


def _said_by(wires: str, rank: int) -> Path:
    return Path(wires).with_name(f"rank{rank}.json")


# All of them


def measured(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Return a run's losses and seconds from its file, or train it."""
    file = Path(options.out) / run.file
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = str(InboundWires.make(Path(folder), run.ranks))
        load = os.getloadavg()[0]
        spawned(rank_main, run.ranks, path, run, options)
        of_ranks = [json.loads(_said_by(path, k).read_text()) for k in range(run.ranks)]
    (first,) = [each for each in of_ranks if each["losses"] is not None]
    document = {
        **run._asdict(),
        "losses": first["losses"],
        "moments": first["moments"],
        "load_before": load,
        "of_ranks": [
            {k: each[k] for k in ("computed", "waited", "bytes", "messages")} for each in of_ranks
        ],
    }
    save(file, document)
    return document


def pace(document: Mapping[str, Any]) -> float:
    """Return seconds per update, without the first two, in which pipelines fill."""
    moments = document["moments"]
    return float(moments[-1] - moments[1]) / (len(moments) - 2)


def paces(document: Mapping[str, Any]) -> list[float]:
    """Return seconds per update of each 25 updates."""
    ends = document["moments"][1::SMOOTHED]
    return [round((b - a) / SMOOTHED, 5) for a, b in pairwise(ends)]


def simulated(run: Run, document: Mapping[str, Any], options: argparse.Namespace) -> float:
    """Return simulated seconds per update, with the seconds that the ranks computed."""
    if run.name in TORCH:
        return float("nan")
    computed = max(each["computed"] for each in document["of_ranks"]) / run.updates
    each = document["of_ranks"][1]
    size = each["bytes"] / max(1, each["messages"])
    link = Link("wire", options.megabits * 1e6 / 8, options.latency / 1e3, inbound=True)
    return step_over_wires(run.name, run.ranks, run.microbatches, computed, link.seconds(size))


def reached(document: Mapping[str, Any], goal: float) -> tuple[int, float] | None:
    """Return updates and seconds to a mean loss of the last minibatches."""
    losses = document["losses"]
    for end in range(SMOOTHED, len(losses) + 1):
        if fmean(losses[end - SMOOTHED : end]) <= goal:
            return end, document["moments"][end - 1]
    return None


def rows_of(ranks: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each candidate."""
    found: list[tuple[Run, dict[str, Any]]] = []
    rates: dict[tuple[str, str], float] = {}
    for codec in CODECS:
        for name in (*METHODS, *(TORCH if codec == BF16 else ())):
            like = "1f1b" if name in (*FLUSHES, *TORCH) else name
            if (like, codec) not in rates:
                cell = cell_of(like, ranks, codec, options)
                start = rates.get((like, BF16), cell.settings.lr)
                rates[like, codec] = search(Path(options.out), cell, start, [0], 1, reach=1)
            run = Run(name, ranks, ranks, codec, rates[like, codec], options.updates)
            if run.flushes:
                numbers = (ranks, 2 * ranks)  # with more, latencies add up
                tried = [run._replace(microbatches=m, updates=PACE) for m in numbers]
                best = min(tried, key=lambda each: pace(measured(each, options)))
                run = best._replace(updates=options.updates)
            found.append((run, measured(run, options)))
            print(
                f"{run.name}, N = {ranks}, M = {run.microbatches}, {codec}: "
                f"{1e3 * pace(found[-1][1]):.0f} ms",
                flush=True,
            )
    first = next(document for run, document in found if (run.name, run.codec) == ("1f1b", BF16))
    end = round(SHARE * options.updates)
    goal = fmean(first["losses"][end - SMOOTHED : end])
    for run, document in found:
        at = reached(document, goal)
        yield {
            **run._asdict(),
            "goal": goal,
            "updates_to_goal": at and at[0],
            "seconds_to_goal": at and at[1],
            "seconds_per_update": pace(document),
            "paces": paces(document),
            "simulated": simulated(run, document, options),
            "of_ranks": document["of_ranks"],
            "losses": [
                round(fmean(document["losses"][max(0, i - SMOOTHED) : i]), 4)
                for i in range(10, options.updates + 1, 10)
            ],
            "moments": [
                round(document["moments"][i - 1], 3) for i in range(10, options.updates + 1, 10)
            ],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="a text")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--megabits", type=float, default=20.0, help="per second, of a wire")
    parser.add_argument("--latency", type=float, default=5.0, help="milliseconds")
    parser.add_argument("--out", type=Path, default=Path("runs/wires"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    about = environment()
    rows = [row for ranks in options.ranks for row in rows_of(ranks, options)]
    settings = {
        name: value for name, value in vars(options).items() if name not in ("data_dir", "out")
    }
    save(
        options.out / "slow-links.json",
        {**about, **settings, "smoothed": SMOOTHED, "share": SHARE, "rows": rows},
    )
    lines = [
        [
            str(row["ranks"]),
            f"`{row['name']}`",
            row["codec"],
            str(row["microbatches"]),
            f"{row['lr']:.3g}",
            str(row["updates_to_goal"]),
            f"{row['seconds_to_goal'] or float('nan'):.1f}",
            f"{1e3 * row['seconds_per_update']:.0f}",
            f"{1e3 * row['simulated']:.0f}",
        ]
        for row in rows
    ]
    print(table(">N|method|codec|>M|>lr|>updates|>s to the loss|>ms per update|>simulated", lines))


if __name__ == "__main__":
    main()
