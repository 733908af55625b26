"""What asynchronous methods cost one process beside a schedule with a flush, 1F1B.

All stages share one process, so a method cannot gain from being asynchronous: what it takes longer
than ``1f1b`` with the same microbatches is its own, for the versions of weights that it keeps and
predicts. Whole runs take turns, every method once in every round, and a ratio is of two runs of the
same round: what disturbs the machine for longer than a round disturbs both.

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
    """Equal stages of one linear layer each."""
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
    """A whole run, its beginning and its end included."""
    start = time.perf_counter()
    for _ in pipe.run(data for _ in range(minibatches)):
        pass
    if data[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rounds(options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """The seconds of every method's run, round by round, after a shorter run of each."""
    pipes = {method: pipeline(method, options) for method in (AGAINST, *options.methods)}
    shape = options.batch, options.width
    data = torch.randn(shape, device=options.device), torch.randn(shape, device=options.device)
    for pipe in pipes.values():
        seconds_of(pipe, data, 2 * options.stages)
    for _ in range(options.rounds):
        yield {name: seconds_of(pipe, data, options.minibatches) for name, pipe in pipes.items()}


def report(found: list[dict[str, float]], options: argparse.Namespace) -> None:
    """The median and the spread of each method's ratios."""
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
    parser.add_argument("--width", type=int, default=2048, help="of each stage's linear layer")
    parser.add_argument("--batch", type=int, default=16, help="samples per minibatch")
    parser.add_argument("--microbatches", type=int, default=4, help="of each minibatch")
    parser.add_argument("--minibatches", type=int, default=30, help="of each run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch; as many as it takes, otherwise")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="file for the seconds of all runs")
    options = parser.parse_args()
    # For all methods alike: how much glibc gives back depends on what the process did before.
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
