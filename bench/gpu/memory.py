"""Checks that memory stops growing over many runs: tensors, allocator, driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spectrain_ext as st

from .cases import Cases
from .eight import sgd
from .launch import run_all
from .ranks import LIMIT_S, own_groups
from .scale import Scale

_STAGES = 4
#: Rounds after which all permanent memory is allocated.
_SETTLED = 2
#: Allowed growth in bytes, of tensors and of the driver's total (others may use the GPU).
_TENSORS, _DRIVER = 2**20, 256 * 2**20


def memory(cases: Cases, scale: Scale) -> None:
    """Run one process on one device and on all, then two processes."""
    for method in ("auto", "spectrain"):
        places = ["one"] if scale.gpus < 2 else ["one", "all"]
        for where in places:
            count = 1 if where == "one" else scale.gpus
            case = f"{method}, {where} of the devices"
            cases.run(case, lambda m=method, n=count: _together(m, n, scale))  # type: ignore[misc]
    cases.run("auto, two processes", lambda: _apart(scale))


def _modules(scale: Scale) -> list[nn.Module]:
    width = max(8, scale.stress[1])
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(_STAGES)]


def _together(method: str, devices: int, scale: Scale) -> dict[str, Any]:
    places = (scale.devices(devices) * _STAGES)[:_STAGES]
    pipe = st.Pipeline(_modules(scale), sgd, nn.functional.mse_loss, method, places)
    return settled(rounds(pipe, 0, scale))


def _apart(scale: Scale) -> dict[str, Any]:
    found = run_all(rank_main, 2, scale, limit_s=LIMIT_S)
    return {f"rank {rank}": settled(each) for rank, each in enumerate(found)}


def rank_main(rank: int, ranks: int, scale: Scale) -> list[dict[str, int]]:
    with own_groups():
        pipe = st.DistributedPipeline(
            _modules(scale)[rank::ranks],
            sgd,
            nn.functional.mse_loss,
            device=scale.devices(rank + 1)[-1],
            timeout=60.0,
        )
        found = rounds(pipe, rank, scale)
        del pipe
    return found


def rounds(pipe: st.Pipeline, rank: int, scale: Scale) -> list[dict[str, int]]:
    """Train and evaluate repeatedly; return bytes after every evaluation."""
    _, width, examples = scale.stress
    batches = [(torch.randn(examples, max(8, width)),) * 2 for _ in range(3)]
    given: Any = None if rank else batches
    found = []
    for _ in range(scale.evaluations):
        for _ in pipe.run(given):
            pass
        pipe.evaluate(given)
        scale.wait()
        found.append(_bytes(scale))
    return found


def _bytes(scale: Scale) -> dict[str, int]:
    if not scale.on_gpu:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"driver": pages * os.sysconf("SC_PAGE_SIZE")}
    every = range(scale.gpus)
    free = [torch.cuda.mem_get_info(k) for k in every if torch.cuda.memory_reserved(k)]
    return {
        "allocated": sum(torch.cuda.memory_allocated(k) for k in every),
        "reserved": sum(torch.cuda.memory_reserved(k) for k in every),
        "driver": sum(total - left for left, total in free),
    }


def settled(found: list[dict[str, int]]) -> dict[str, Any]:
    """Return first, settled and last bytes; raise AssertionError if they still grow."""
    before, after = found[_SETTLED], found[-1]
    limits = {"allocated": _TENSORS, "reserved": _DRIVER, "driver": _DRIVER}
    grown = {k: after[k] - before[k] for k in after}
    if any(grown[k] > limits[k] for k in grown):
        raise AssertionError(
            f"from evaluation {_SETTLED + 1} to {len(found)} bytes grew by {grown}: {found}"
        )
    return {"evaluations": len(found), "first": found[0], "settled": before, "last": after}
