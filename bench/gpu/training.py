"""Trains eight stages by `auto`, the default, and `1f1b`: in one process, then one per GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import spectrain_ext as st

from .cases import Cases
from .launch import run_all
from .ranks import LIMIT_S, backend_of_bodies, fits, own_groups
from .scale import Scale

STAGES = 8
METHODS = ("auto", "1f1b")


def training(cases: Cases, scale: Scale) -> None:
    """Run one process with all devices, then several processes with several stages each."""
    for ranks in (1, *scale.processes):
        case = f"{ranks} process{'es' * (ranks > 1)}"
        if fits(cases, case, ranks, scale):
            cases.run(case, lambda n=ranks: throughput(n, scale), cases.slowest_s)  # type: ignore[misc]


def stages(scale: Scale) -> list[nn.Module]:
    """Return equal stages with fixed weights."""
    torch.manual_seed(0)
    width = scale.training[1]
    linears = [nn.Linear(width, width) for _ in range(STAGES)]
    # eight of torch's default layers would leave almost nothing of the input
    for linear in linears:
        nn.init.xavier_uniform_(linear.weight)
    return [nn.Sequential(linear, nn.Tanh()) for linear in linears]


def batch(scale: Scale) -> tuple[Tensor, Tensor]:
    """Return one minibatch, which is used repeatedly."""
    _, width, examples = scale.training
    gen = torch.Generator().manual_seed(1)
    x, y = (torch.randn(examples * STAGES, width, generator=gen) for _ in "xy")
    return x, y.mul_(0.1).add_(0.5)  # at any width the biases learn this much at once


def sgd(parameters: Any) -> Any:
    return st.optim.SGD(parameters, lr=0.1, momentum=0.9)


def measured(
    pipes: Mapping[str, st.Pipeline],
    data: tuple[Tensor, Tensor] | None,  # None: another rank has it
    scale: Scale,
    lossy: bool,  # whether this process has the losses
) -> dict[str, Any]:
    """Return minibatches per second of each, in turn, and its first and last loss."""
    minibatches = scale.training[0]
    speeds: dict[str, list[float]] = {name: [] for name in pipes}
    losses: dict[str, list[float]] = {name: [] for name in pipes}
    given: Any = None if data is None else [data] * minibatches
    for _ in range(1 + min(5, scale.rounds)):  # the first one is warm-up
        for name, pipe in pipes.items():
            dist.barrier()
            scale.wait()
            start = time.perf_counter()
            kept = [result.loss.detach() for result in pipe.run(given) if lossy]
            scale.wait()
            speeds[name].append(minibatches / (time.perf_counter() - start))
            losses[name] += [float(loss) for loss in kept]
    return {
        name: {
            "minibatches_per_s": statistics.median(speeds[name][1:]),
            "all": speeds[name],
            "losses": [losses[name][0], losses[name][-1]] if lossy else [],
        }
        for name in pipes
    }


def throughput(ranks: int, scale: Scale) -> dict[str, Any]:
    """Measure several processes with equal shares of the eight stages, or one with all devices."""
    found: Sequence[dict[str, Any]] = run_all(rank_main, ranks, scale, limit_s=LIMIT_S)
    # The last rank has the losses. Rank 0 starts every minibatch and finishes its last backward.
    mine, last = found[0], found[-1]
    for method in METHODS:
        before, after = mine[method]["losses"] = last[method]["losses"]
        if not after < before:
            raise AssertionError(f"{method} does not train: its loss went from {before} to {after}")
    ratio = mine["auto"]["minibatches_per_s"] / mine["1f1b"]["minibatches_per_s"]
    return {"auto_over_1f1b": ratio, **mine}


def rank_main(rank: int, ranks: int, scale: Scale) -> dict[str, Any]:
    x, y = batch(scale)
    with own_groups():
        pipes: dict[str, st.Pipeline] = {}
        # In one process, too, a stage's neighbours are on other devices.
        places = scale.devices(STAGES) if ranks == 1 else [scale.devices(rank + 1)[-1]]
        for method in METHODS:
            if ranks == 1:
                pipes[method] = st.Pipeline(
                    stages(scale), sgd, nn.functional.mse_loss, method, places, microbatches=STAGES
                )
            else:
                pipes[method] = st.DistributedPipeline(
                    stages(scale)[rank::ranks],
                    sgd,
                    nn.functional.mse_loss,
                    method,
                    device=places[0],
                    microbatches=STAGES,
                    timeout=60.0,
                )
        data = (x.to(places[0]), y.to(places[-1])) if rank == 0 else None
        found = measured(pipes, data, scale, rank == ranks - 1)
        found["devices"] = len(set(places)) if ranks == 1 else min(ranks, scale.gpus)
        found["backend"] = backend_of_bodies() if ranks > 1 else "one process"
        pipes.clear()
    return found
