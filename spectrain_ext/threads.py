"""Finds how many cores this process may use, and warns if torch has more threads than cores.

OpenMP threads wait for one another without releasing their cores, so one thread without a core
stops the others. Four stages of 16 by 16 took 1.6 ms per minibatch with one thread on a machine
with two cores and a load of 8. With two threads, the default there, they took 70 to 100 ms, and 3
to 8 ms with OMP_WAIT_POLICY=PASSIVE. Even in the best of those runs a second thread did not help
this model: 0.9 instead of 0.8 ms.
"""

from __future__ import annotations

import logging
import math
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_logger = logging.getLogger(__name__)
_CGROUP = Path("/sys/fs/cgroup")


class Crowd(NamedTuple):
    """A problem with too many threads for the cores, and its remedy."""

    what: str
    remedy: str


def cores() -> int:
    """Return how many cores this process may use, by affinity and control group."""
    affinity = getattr(os, "sched_getaffinity", None)
    there = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    return max(1, math.ceil(min(there, _quota())))


def _quota() -> float:
    """Return the control group's limit in cores; infinite without one."""
    old = [_CGROUP / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    for files in ([_CGROUP / "cpu.max"], old):
        try:
            quota, period = (float(part) for file in files for part in file.read_text().split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return quota / period if quota > 0 and period > 0 else math.inf
    return math.inf


def crowded() -> Crowd | None:
    """Describe too many threads of the processes that torchrun started here; None: not so."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = max(1, int(given)) if given.isdigit() else 1
    threads, there = torch.get_num_threads(), cores()
    if threads * processes <= there:
        return None
    each = max(1, there // processes)
    on = f"{there} core{'s' * (there != 1)}"
    shared = f"{processes} processes share {on}"
    if threads <= each:
        return Crowd(f"{shared}.", f"start at most {there} of them here")
    what = f"torch computes with {threads} threads on {on}."
    if processes > 1:
        what = f"{shared}, and torch computes with {threads} threads in each."
    return Crowd(
        what,
        f"OMP_NUM_THREADS={each} before Python starts, or torch.set_num_threads({each}); small "
        "models want one thread",
    )


def disturbed() -> Crowd | None:
    """Describe other work that leaves torch's threads without a core each; None: there is none."""
    threads, there = torch.get_num_threads(), cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if threads == 1 or load + threads <= there + 1:
        return None
    return Crowd(
        f"Other work is on these cores (load {load:.1f} on {there}), and torch computes with "
        f"{threads} threads, which wait for one another: a small model may take fifty times as "
        "long as with one.",
        "OMP_NUM_THREADS=1 or torch.set_num_threads(1) for small models; OMP_WAIT_POLICY=PASSIVE "
        "for large ones",
    )


@cache
def warn_of_threads() -> None:
    """Warn once in the log of too many threads; only on the first process of this machine."""
    crowd = crowded()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if crowd is not None and first and torch.get_num_threads() > 1:
        _logger.warning("%s Remedy: %s", *crowd)
