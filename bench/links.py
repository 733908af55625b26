"""Measures the link between processes of this machine, for the planner."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.partitioning import cut_at
from spectrain_ext.tools.planning import Link, measure_layers
from spectrain_ext.tools.planning.costs import Costs, Setting, Way

_SIZES = (1 << 14, 1 << 20)  # bytes of a message
_TIMES, _WARM = 40, 8
_ROUNDS = 3
_MICROBATCHES = 8
_WIDTH, _LAYERS, _ROWS = 192, 12, 256  # of stages that compute for some milliseconds


def measured_link(rank: int, ranks: int) -> Link:
    """Measure the link over gloo and the loopback device, on all ranks at once; rank 0's counts."""
    latency, per_byte = _line(lambda size: _sent(rank, size))
    # CPU time per byte, in a pipeline whose stages compute next to nothing.
    busy, busy_per_byte = _line(lambda size: _handled(ranks, size))
    link = Link("gloo, measured", 1 / per_byte, latency, busy, 1 / busy_per_byte)
    # CPU time per message, in a pipeline whose stages compute for some milliseconds, less the time
    # a plan gives for their work. It includes the engine's work and cache misses where processes
    # share a core; no layer's time includes these.
    return replace(link, busy=max(0.0, _besides(rank, ranks, replace(link, busy=0.0))))


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _line(seconds: Callable[[int], float]) -> tuple[float, float]:
    """Return a message's constant seconds, at least 0, and seconds per byte, at least 1e-13."""
    small, large = map(seconds, _SIZES)
    per_byte = max((large - small) / (_SIZES[1] - _SIZES[0]), 1e-13)
    return max(0.0, small - per_byte * _SIZES[0]), per_byte


def _sent(rank: int, size: int) -> float:
    message, taken = torch.zeros(size // 4), []  # there and back, halved
    for _ in range(_TIMES if rank < 2 else 0):
        began = time.perf_counter()
        for sender in range(2):
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        taken.append((time.perf_counter() - began) / 2)
    dist.barrier()
    return min(taken, default=0.0)  # others may use the machine as well


def _handled(ranks: int, size: int) -> float:
    batch = torch.ones(_MICROBATCHES, size // 4), torch.zeros(_MICROBATCHES, size // 4)
    return _used(_Scale(), batch) / _ends(ranks)


def _besides(rank: int, ranks: int, link: Link) -> float:
    """Return CPU seconds per message beyond the planned work of stages that compute."""
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS * ranks)]
    # One block per stage: blocks measured alone take longer, small ones most of all.
    blocks = [
        nn.Sequential(*(m for layer in layers[start : start + _LAYERS] for m in (layer, nn.Tanh())))
        for start in range(0, len(layers), _LAYERS)
    ]
    batch = torch.randn(_ROWS, _WIDTH), torch.randn(_ROWS, _WIDTH)
    ends = tuple(range(1, ranks + 1))
    cores = len(os.sched_getaffinity(0))
    stage, beyond = cut_at(blocks, ends)[rank], []
    for _ in range(_ROUNDS):
        planned = 0.0
        dist.barrier()
        if rank < cores:  # all cores are busy, as in the run
            measured = measure_layers(blocks, batch[0], repeats=9)
            way = Way(find_method("vanilla"), ends, (1,) * ranks, _MICROBATCHES)
            planned = work_of(Costs(Setting(measured, link, _ROWS, cores), way))
        dist.barrier()
        beyond.append(_used(stage, batch) - planned)
    return median(beyond) / _ends(ranks)


def work_of(costs: Costs) -> float:
    """Return the CPU seconds of all ranks for a minibatch, as a plan has them."""
    d = costs.durations
    turns = zip(d.load_forward, d.forward, d.load_backward, d.backward, strict=True)
    shares = zip(turns, d.update, costs.places, costs.way.replicas, strict=True)
    return sum(r * (place.microbatches * sum(turn) + update) for turn, update, place, r in shares)


def _ends(ranks: int) -> int:
    return 2 * 2 * (ranks - 1) * _MICROBATCHES


def _used(stage: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    pipe = st.DistributedPipeline(
        stage,
        lambda params: st.optim.SGD(params, lr=0.0, momentum=0.9),
        nn.functional.mse_loss,
        "vanilla",
        microbatches=_MICROBATCHES,
        timeout=60.0,
    )
    times = []
    for _ in pipe.run(batch for _ in range(_WARM + _TIMES)):
        times.append(time.process_time())
    used = torch.tensor((times[-1] - times[_WARM - 1]) / _TIMES, dtype=torch.float64)
    dist.all_reduce(used)
    return float(used)
