"""Heap, for benchmarks: memory that the CPU's allocator keeps from one minibatch to the next.

glibc gives free memory at the end of its heap back to the system, which takes it back page by page
at the next use, and clears each. What a minibatch frees are the gradients of all weights and the
activations: a stage of 12 MB of weights had 900 to 2,800 such page faults in every minibatch, 2 to
5 ms of its 30, more in some processes than in others, as it depends on what lies above.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

_logger = logging.getLogger(__name__)
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST = 2**31 - 1  # that mallopt takes
# glibc comes to this by itself, as blocks of that size are freed, unless one of the two is set.
_LARGEST_BLOCK = 32 * 2**20


def _is_set_up() -> bool:
    """Whether whoever started this process has said what its allocator is to do."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
    return any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )


@cache
def keep_freed_memory() -> None:
    """Have glibc keep up to 2 GB of what is freed, for the next minibatch; once a process.

    The most that the process holds does not change by it. Nothing is done where the environment
    sets glibc's allocator up, and no other allocator is touched.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None or _is_set_up():
        return
    if mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_M_TRIM_THRESHOLD, _MOST):
        _logger.debug("glibc keeps what is freed, up to %d bytes", _MOST)
