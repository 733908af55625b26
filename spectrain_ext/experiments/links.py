"""Links: what messages between two processes of this machine take, measured."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from spectrain_ext import optim
from spectrain_ext.distributed import DistributedPipeline
from spectrain_ext.distributed.store import store_at
from spectrain_ext.planning import Link

_SIZES = (1 << 14, 1 << 20)  # bytes of a message
_TIMES, _WARM = 40, 8
_PARTS = 8


def measured_link() -> Link:
    """The link of two processes of this machine, over gloo and the loopback device.

    Latency and bandwidth are those of a message to the other process and back. What a message
    keeps either process busy is its CPU time, in all its threads, in a run of a pipeline whose
    stages compute next to nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "link.json"
        store: Any = store_at("127.0.0.1", 0, listen=True)
        start_processes(_rank, (store.port, str(path)), nprocs=2, start_method="spawn")
        found = json.loads(path.read_text())
    (latency, per_byte), (busy, busy_per_byte) = found
    return Link("gloo, measured", 1 / per_byte, latency, busy, 1 / busy_per_byte)


class _Scale(nn.Module):
    """A stage of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _rank(rank: int, port: int, path: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = store_at("127.0.0.1", port, listen=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )
    found = [_line(lambda size: _sent(rank, size)), _line(_handled)]
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _line(seconds: Callable[[int], float]) -> tuple[float, float]:
    """Seconds of a message, as a constant and seconds per byte, neither below almost nothing."""
    small, large = map(seconds, _SIZES)
    per_byte = max((large - small) / (_SIZES[1] - _SIZES[0]), 1e-13)
    return max(0.0, small - per_byte * _SIZES[0]), per_byte


def _sent(rank: int, size: int) -> float:
    message, taken = torch.zeros(size // 4), []
    for _ in range(_TIMES):
        began = time.perf_counter()
        for sender in range(2):
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        taken.append((time.perf_counter() - began) / 2)
    return min(taken)  # others may use the machine as well


def _handled(size: int) -> float:
    """CPU seconds of one rank for one message that it sends or receives, the mean of both."""
    pipe = DistributedPipeline(
        _Scale(),
        lambda params: optim.SGD(params, lr=0.0),
        nn.functional.mse_loss,
        "vanilla",
        microbatches=_PARTS,
        timeout=60.0,
    )
    batch = torch.ones(_PARTS, size // 4), torch.zeros(_PARTS, size // 4)
    times = []
    for _ in pipe.run(batch for _ in range(_WARM + _TIMES)):
        times.append(time.process_time())
    # An activation and a gradient of every microbatch pass each of the two.
    own = (times[-1] - times[_WARM - 1]) / (_TIMES * _PARTS * 2)
    used = torch.tensor(own)
    dist.all_reduce(used)
    return float(used) / 2
