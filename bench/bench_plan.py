"""Compares the planner's predictions with 2, 3 and 4 gloo processes on this machine.

It measures the link first, with as many processes. Every round measures the layers, with as many
processes at once as there are cores, and then every configuration; each round's plan uses its own
layers. Ratios of planned to measured time are taken round by round; medians count.

    python bench/bench_plan.py --json run.json      # about 6 minutes, wants two idle cores
    python bench/bench_plan.py --quick              # a rehearsal: no valid figures
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_distributed import WIDTH, join_group, optimizer_of, spawned
from links import measured_link, work_of
from rivals.machine import environment, save
from table import table
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.partitioning import cut_at
from spectrain_ext.schedule import Replicas
from spectrain_ext.tools.planning import Layers, Link, measure_layers
from spectrain_ext.tools.planning.costs import Costs, Setting, Way

PROCESSES = (2, 3, 4)
#: Layers of each block, for a model with equal blocks and one with unequal blocks.
MODELS = {"even": (2,) * 12, "uneven": (1, 1, 4, 2, 1, 3, 5, 1, 1, 3, 1, 1)}
_WARM = 5  # minibatches: a pipeline of four stages is full, and nothing drains yet
#: Seconds of a minibatch, planned and measured, each with the CPU seconds of all ranks.
KINDS = ("planned", "planned_work", "measured", "measured_work")


class Case(NamedTuple):
    """One configuration of some processes."""

    model: str
    method: str
    microbatches: int
    replicas: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.replicas)

    def __str__(self) -> str:
        counts = ",".join(map(str, self.replicas))
        return f"{self.model}, {self.method}, stages {counts}, M = {self.microbatches}"


def cases(processes: int) -> Iterator[Case]:
    """Yield the configurations of a number of processes."""
    n, ones = processes, (1,) * processes
    yield Case("even", "sync", n, (n,))  # data parallelism
    for model in MODELS:
        for method, microbatches in (
            *(("1f1b", n), ("1f1b", 2 * n), ("gpipe", 2 * n)),
            *(("spectrain", 1), ("spectrain", n), ("auto", n), ("auto", 2 * n)),
        ):
            yield Case(model, method, microbatches, ones)
    for replicas in {3: ((1, 2), (2, 1)), 4: ((1, 2, 1), (2, 2))}.get(n, ()):
        for method in ("1f1b", "auto"):
            yield Case("even", method, 4, replicas)


def model_of(name: str) -> list[nn.Module]:
    """Return the same model on all ranks; tanh, since dead units decay into subnormals."""
    torch.manual_seed(0)
    return [
        nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        for layers in MODELS[name]
    ]


def ends_of(case: Case) -> tuple[int, ...]:
    """Cut by number of layers and replicas, independent of any measurement."""
    layers = MODELS[case.model]
    whole, total, done, ends = sum(layers), sum(case.replicas), 0, []
    for k, r in enumerate(case.replicas[:-1]):
        done += r
        reached = [sum(layers[:end]) for end in range(len(layers) + 1)]
        wanted = whole * done / total
        most = len(layers) - (case.stages - 1 - k)
        least = (ends[-1] if ends else 0) + 1
        ends.append(min(range(least, most + 1), key=lambda end: abs(reached[end] - wanted)))
    return (*ends, len(layers))


class Runner:
    """One configuration's pipeline on this rank."""

    def __init__(self, case: Case, batch: int, rank: int) -> None:
        stage, _ = Replicas(case.replicas).stage_and_replica(rank)
        self._pipe = st.DistributedPipeline(
            cut_at(model_of(case.model), ends_of(case))[stage],
            optimizer_of,
            nn.functional.mse_loss,
            case.method,
            microbatches=case.microbatches,
            replicas=case.replicas,
            timeout=120.0,
        )
        torch.manual_seed(0)
        self._batch = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)

    def period(self, seconds: float, guess: float) -> tuple[float, float]:
        """Return the seconds and CPU seconds of a minibatch, without the first and last ones."""
        count = max(8, round(seconds / guess))
        times = []
        for _ in self._pipe.run(self._batch for _ in range(count + 2 * _WARM)):
            times.append((time.perf_counter(), time.process_time()))
        whole, own = (
            (end - begin) / count
            for begin, end in zip(times[_WARM - 1], times[-_WARM - 1], strict=True)
        )
        return whole, own


def layers_of(name: str, batch: int, rank: int, cores: int, quick: bool) -> Layers:
    """Return rank 0's layer times, measured on as many ranks at once as there are cores."""
    layers = None
    dist.barrier()
    if rank < cores:
        example = torch.randn(batch, WIDTH)
        layers = measure_layers(model_of(name), example, repeats=3 if quick else 9)
    dist.barrier()
    assert layers is not None or rank
    return layers  # type: ignore[return-value]


def rank_main(rank: int, processes: int, port: int, said: Any, options: argparse.Namespace) -> None:
    join_group(rank, processes, port)
    link = measured_link(rank, processes)
    cores = len(os.sched_getaffinity(0))
    todo = list(cases(processes))[:: 5 if options.quick else 1]
    runners = [Runner(case, options.batch, rank) for case in todo]
    rows: list[dict[str, Any]] = [
        {
            **{**case._asdict(), "case": str(case), "ends": ends_of(case)},
            **{name: [] for name in KINDS},
        }
        for case in todo
    ]
    for _ in range(options.rounds):
        models = {
            name: layers_of(name, options.batch, rank, cores, options.quick) for name in MODELS
        }
        for row, case, runner in zip(rows, todo, runners, strict=True):
            planned = torch.zeros(2, dtype=torch.float64)
            if rank == 0:
                planned[:] = torch.tensor(
                    planned_of(case, models[case.model], link, options.batch, cores)
                )
            dist.broadcast(planned, 0)
            dist.barrier()
            measured, own = runner.period(options.seconds, float(planned[0]))
            used = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(used)
            for name, value in zip(KINDS, (*planned.tolist(), measured, float(used)), strict=True):
                row[name].append(value)
    if rank == 0:
        said.put({"processes": processes, "cores": cores, "link": asdict(link), "rows": rows})
    dist.barrier()
    dist.destroy_process_group()


def planned_of(
    case: Case, layers: Layers, link: Link, batch: int, cores: int
) -> tuple[float, float]:
    """Return the planner's period of a configuration and the work of all its ranks."""
    way = Way(find_method(case.method), ends_of(case), case.replicas, case.microbatches)
    costs = Costs(Setting(layers, link, batch, cores), way)
    return costs.period, work_of(costs)


def ratio_of(row: dict[str, Any]) -> float:
    """Return planned over measured time: the median of the rounds' ratios."""
    return median(p / m for p, m in zip(row["planned"], row["measured"], strict=True))


def show(part: dict[str, Any]) -> None:
    link = Link(**part["link"])
    print(
        f"a message: {1e6 * link.latency:.0f} us and {link.bandwidth / 1e9:.2f} GB/s, either "
        f"CPU busy for {1e6 * link.busy:.0f} us and {link.busy_bandwidth / 1e9:.2f} GB/s"
    )
    print(f"\n{part['processes']} processes on {part['cores']} cores\n")
    ratios = [ratio_of(row) for row in part["rows"]]
    lines = []
    for row, ratio in zip(part["rows"], ratios, strict=True):
        planned, work, measured, used = (f"{1e3 * median(row[name]):.1f}" for name in KINDS)
        lines.append([row["case"], planned, measured, f"{ratio:.2f}", f"{work} of {used}"])
    print(table("configuration|>planned ms|>measured ms|>planned over measured|>work ms", lines))
    within = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    print(f"\n{within} of {len(ratios)} within 10 %", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=384, help="samples per minibatch")
    parser.add_argument("--seconds", type=float, default=1.0, help="per configuration and round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--processes", type=int, nargs="*", default=PROCESSES)
    parser.add_argument("--quick", action="store_true", help="a fifth of the work")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.seconds = 1, 0.2
    began, about = time.monotonic(), environment()  # with the load before the run
    parts = []
    for processes in options.processes:
        parts.append(spawned(rank_main, processes, options))
        show(parts[-1])
    print(f"{time.monotonic() - began:.0f} s")
    if options.json:
        command = f"python bench/bench_plan.py --rounds {options.rounds} --json plan.json"
        chosen = {name: getattr(options, name) for name in ("quick", "batch", "rounds", "seconds")}
        save(options.json, {"command": command, **about, **chosen, "runs": parts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
