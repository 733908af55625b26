"""Measures what asynchronous methods cost in one process, relative to 1F1B with a flush.

All stages share one process, so that a method gains nothing from asynchrony: time beyond that of
``1f1b`` with the same microbatches is the cost of the weight versions that it stores and predicts.
Whole runs take turns, every method once per round, and a ratio compares two runs of one round: a
disturbance longer than a round affects both.

    python bench/bench_flush.py                    # four stages of 4.2 million weights, AdamW
    python bench/bench_flush.py --methods spectrain --rounds 15 --json flush.json
    python bench/bench_flush.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from statistics import median, quantiles

import torch
from heap import keep_freed_memory
from torch import Tensor, nn

import spectrain_ext as st

AGAINST = "1f1b"
METHODS = ("auto", "pipedream-2bw", "spectrain")


def pipeline(method: str, options: argparse.Namespace) -> st.Pipeline:
    """Return a pipeline of equal stages with one linear layer each."""
    torch.manual_seed(0)
    width, device = options.width, torch.device(options.device)
    return st.Pipeline(
        [nn.Linear(width, width, device=device) for _ in range(options.stages)],
        optimizer=lambda params: st.optim.AdamW(params, lr=1e-4),
        loss_fn=nn.functional.mse_loss,
        method=method,
        microbatches=options.microbatches,
    )


def seconds_of(pipe: st.Pipeline, data: tuple[Tensor, Tensor], minibatches: int) -> float:
    """Return the seconds of a whole run, including start and end."""
    start = time.perf_counter()
    for _ in pipe.run(data for _ in range(minibatches)):
        pass
    if data[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rounds(options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Return the seconds of every method's run by round, each after a shorter warm-up run."""
    pipes = {method: pipeline(method, options) for method in (AGAINST, *options.methods)}
    shape = options.batch, options.width
    data = torch.randn(shape, device=options.device), torch.randn(shape, device=options.device)
    for pipe in pipes.values():
        seconds_of(pipe, data, 2 * options.stages)
    for _ in range(options.rounds):
        yield {name: seconds_of(pipe, data, options.minibatches) for name, pipe in pipes.items()}


def report(found: list[dict[str, float]], options: argparse.Namespace) -> None:
    """Print the median and the spread of each method's ratios."""
    weights = options.width * (options.width + 1) / 1e6
    print(
        f"{options.stages} stages of {weights:.1f} million weights, batch {options.batch}, "
        f"M = {options.microbatches}, AdamW, {options.device}: {len(found)} rounds of "
        f"{options.minibatches} minibatches"
    )
    base = median(each[AGAINST] for each in found) / options.minibatches
    print(f"{AGAINST}: {base * 1e3:.2f} ms per minibatch\n")
    print(f"| | time over {AGAINST}'s | quartiles | least and most |")
    print("|---|---|---|---|")
    for method in options.methods:
        ratios = sorted(each[method] / each[AGAINST] for each in found)
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(
            f"| {method} | {median(ratios):.3f} | {low:.3f} to {high:.3f} "
            f"| {ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument(
        "--width", type=int, default=2048, help="width of each stage's linear layer"
    )
    parser.add_argument("--batch", type=int, default=16, help="samples per minibatch")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches per minibatch")
    parser.add_argument("--minibatches", type=int, default=30, help="minibatches per run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="torch's threads; default: torch's own number")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="file for the seconds of all runs")
    options = parser.parse_args()
    # For all methods: how much memory glibc returns depends on the process's history.
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    found = list(rounds(options))
    report(found, options)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "seconds": found}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
