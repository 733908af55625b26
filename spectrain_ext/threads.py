"""Threads: the cores that this process may use, and whether torch's threads have one each.

OpenMP's threads wait for one another without letting go of their cores, so that one without a core
stops the others. Four stages of 16 by 16 took 1.6 ms a minibatch on one thread of a machine whose
two cores had a load of 8, and 70 to 100 ms on two, the default there; with OMP_WAIT_POLICY=PASSIVE
3 to 8 ms. In the best of those runs a second thread brought such a model nothing: 0.9 ms, not 0.8.
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
    """Threads that have no core each."""

    what: str
    remedy: str


def cores() -> int:
    """Those that this process may run on, and no more than its control group has the time of."""
    affinity = getattr(os, "sched_getaffinity", None)
    there = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    return max(1, math.ceil(min(there, _quota())))


def _quota() -> float:
    """Cores' worth of time, as containers are given it; infinite where nobody says."""
    old = [_CGROUP / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    for files in ([_CGROUP / "cpu.max"], old):
        try:
            quota, period = (float(part) for file in files for part in file.read_text().split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return quota / period if quota > 0 and period > 0 else math.inf
    return math.inf


def crowded() -> Crowd | None:
    """What is said of the processes that torchrun has started here; None: all have a core."""
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
    """The same where other work leaves torch's threads no core each; None where it does."""
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
    """Say once in the log if they have not; of several processes one says it."""
    crowd = crowded()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if crowd is not None and first and torch.get_num_threads() > 1:
        _logger.warning("%s Remedy: %s", *crowd)
