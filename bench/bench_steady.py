"""Measures two gloo processes in the steady state against torch's 1F1B, and a run's two ends.

Each rank has eight blocks of width 256, and a minibatch of 256 samples is cut into an increasing
number of microbatches, which makes the cost of a microbatch beyond its arithmetic visible. Seconds
of a minibatch are measured between two results, away from both ends of a run. Torch's schedule,
which flushes in every step, is measured over steps. Candidates take turns in every round and are
made anew for it, as in bench_distributed.py. The slower rank counts.

The start lasts from the call of ``run`` until it requests the first batch. The end lasts from the
last update of all, which is the first stage's, until the run is over on both ranks.

    python bench/bench_steady.py                          # two minutes, wants two idle cores
    python bench/bench_steady.py --rounds 15 --json steady.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median, quantiles
from typing import Any

import bench_distributed as bench
import torch
import torch.distributed as dist
from heap import keep_freed_memory
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import spectrain_ext as st

RANKS, BLOCKS, SAMPLES = 2, 8, 256
METHODS, PARTS = ("auto", "vanilla"), (2, 4, 8, 16)
WARM, TAIL = 4, 4
EMPTY_RUNS = 5


def pipeline_of(method: str, parts: int) -> st.DistributedPipeline:
    return st.DistributedPipeline(
        bench.stage_of(BLOCKS),
        bench.optimizer_of,
        nn.functional.mse_loss,
        method,
        microbatches=parts,
        timeout=120.0,
        share_loss=True,
    )


def data_of(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)  # the same on all ranks
    return torch.randn(samples, bench.WIDTH), torch.randn(samples, bench.WIDTH)


def steady(method: str, parts: int) -> bench.Measure:
    """Return a function that measures seconds per minibatch in the middle of a run."""
    pipe, data = pipeline_of(method, parts), data_of(SAMPLES)

    def measure(count: int) -> float:
        start = end = 0.0
        for result in pipe.run(data for _ in range(WARM + count + TAIL)):
            if result.index == WARM - 1:
                start = time.perf_counter()
            elif result.index == WARM + count - 1:
                end = time.perf_counter()
        return bench.slowest((end - start) / count)

    return measure


def theirs(rank: int, parts: int) -> bench.Measure:
    """Measure torch's 1F1B, with an update after each step."""
    made = bench.theirs(rank, RANKS, Schedule1F1B, BLOCKS, SAMPLES // parts, parts)
    return lambda count: bench.slowest(parts / made(count * parts))


def ends(rank: int, which: str) -> bench.Measure:
    """Return a function that measures the start or the end of a run of one minibatch (a median)."""
    pipe, data = pipeline_of("auto", 2), data_of(SAMPLES)

    def measure(count: int) -> float:
        begun, updated, over = [], [], []
        for _ in range(EMPTY_RUNS):
            asked: list[float] = []

            def batches(asked: list[float] = asked) -> Iterator[tuple[Tensor, Tensor]]:
                asked.append(time.perf_counter())
                yield data

            dist.barrier()
            start = last = time.perf_counter()
            for _ in pipe.run(batches()):
                last = time.perf_counter()
            over.append(time.perf_counter())
            updated.append(last)
            begun.append(asked[0] - start if asked else 0.0)  # the first stage requests batches
        if which == "begin":
            return bench.slowest(median(begun))
        # All processes of a machine share one clock.
        first = torch.tensor(updated, dtype=torch.float64)
        dist.broadcast(first, 0)
        return bench.slowest(median(b - a for a, b in zip(first.tolist(), over, strict=True)))

    return measure


def candidates(rank: int, options: argparse.Namespace) -> dict[str, Callable[[], bench.Measure]]:
    """Return the factories of all candidates."""
    found: dict[str, Callable[[], bench.Measure]] = {}
    for parts in options.microbatches:
        found[f"torch 1F1B, M = {parts}"] = partial(theirs, rank, parts)
        for method in options.methods:
            found[f"{method}, M = {parts}"] = partial(steady, method, parts)
    return {**found, "begin": partial(ends, rank, "begin"), "end": partial(ends, rank, "end")}


def rank_main(rank: int, ranks: int, port: int, said: Any, options: argparse.Namespace) -> None:
    bench.begin(rank, ranks, port)
    keep_freed_memory()
    figures = bench.rounds_of(bench.each_anew(candidates(rank, options), options.count), options)
    if rank == 0:
        said.put({"load": os.getloadavg(), "seconds": figures})
    bench.end()


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print medians and quartiles of ratios taken round by round."""
    figures: dict[str, list[float]] = found["seconds"]
    print(
        f"{RANKS} ranks of {BLOCKS} blocks of width {bench.WIDTH}, {SAMPLES} samples, "
        f"{len(figures['begin'])} rounds of {options.count} minibatches, "
        f"load {found['load'][0]:.1f} on {os.cpu_count()} cores\n"
    )
    print("| | ms per minibatch | times as fast as torch's 1F1B | quartiles |")
    print("|---|---|---|---|")
    for parts in options.microbatches:
        rival = figures[f"torch 1F1B, M = {parts}"]
        print(f"| torch 1F1B, M = {parts} | {median(rival) * 1e3:.2f} | | |")
        for method in options.methods:
            own = figures[f"{method}, M = {parts}"]
            ratios = [a / b for a, b in zip(rival, own, strict=True)]
            low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            print(
                f"| {method}, M = {parts} | {median(own) * 1e3:.2f} | {median(ratios):.3f} "
                f"| {low:.3f} to {high:.3f} |"
            )
    begin, end = (median(figures[name]) * 1e3 for name in ("begin", "end"))
    print(f"\na run of auto takes {begin:.2f} ms to begin and {end:.2f} ms to end")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(PARTS))
    parser.add_argument("--count", type=int, default=24, help="minibatches of each measurement")
    parser.add_argument("--rounds", type=int, default=7, help="rounds at most")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="seconds for all rounds"
    )
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    found = bench.spawned(rank_main, RANKS, options)
    report(found, options)
    if options.json:
        document = {**bench.about(), "options": bench.settings_of(options), **found}
        with open(options.json, "w") as file:
            json.dump(bench.rounded(document), file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
