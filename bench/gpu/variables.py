"""Measures environment variables of drivers and NCCL, each in new processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .cases import Cases
from .eight import METHODS, throughput
from .scale import Scale

#: The device's hardware queues, and whether kernels are loaded at their first launch.
OF_DEVICES: list[dict[str, str]] = [
    {},
    *({"CUDA_DEVICE_MAX_CONNECTIONS": n} for n in ("1", "8", "32")),
    {"CUDA_MODULE_LOADING": "EAGER"},
]
#: The number of NCCL blocks, which take multiprocessors away from compute.
OF_NCCL: list[dict[str, str]] = [
    {},
    *({"NCCL_MAX_CTAS": n} for n in ("1", "2", "4", "8")),
    *({"NCCL_MAX_P2P_NCHANNELS": n} for n in ("1", "2", "4")),
    *({"CUDA_DEVICE_MAX_CONNECTIONS": n} for n in ("1", "8", "32")),
    {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_MAX_CTAS": "2"},
]


def variables(cases: Cases, scale: Scale) -> None:
    """Run a case per setting, twice: eight stages in one process, then in a process per GPU."""
    ranks = max((n for n in scale.processes if n <= scale.gpus), default=0)
    if scale.few is not None:
        ranks = min(ranks, 2)
    for again in ("", ", again")[: scale.few and 1]:
        for count, settings in ((1, OF_DEVICES), (ranks, OF_NCCL)):
            # A rehearsal runs only the last.
            for setting in settings if scale.few is None else settings[-1:]:
                case = f"{_named(setting)}, {_processes(count)}{again}"
                if count:
                    cases.run(case, lambda s=setting, n=count: _run(s, n, scale), cases.slowest_s)  # type: ignore[misc]
                else:
                    cases.put(case, "skipped", error="it needs 2 GPUs, and 1 can be used")


def _named(setting: dict[str, str]) -> str:
    return " ".join(f"{k}={v}" for k, v in setting.items()) or "as it is"


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count or 'several'} processes"


def _run(setting: dict[str, str], ranks: int, scale: Scale) -> dict[str, Any]:
    found = throughput(ranks, replace(scale, rounds=2), setting)
    speeds = {method: found[method]["minibatches_per_s"] for method in METHODS}
    return {"backend": found["backend"], "minibatches_per_s": speeds}
