"""Keeps freed memory in the CPU's allocator from one minibatch to the next, for benchmarks.

glibc returns free memory at the end of its heap to the system. The next use gets it back page by
page, each page cleared. A minibatch frees the gradients of all weights and the activations: a stage
of 12 MB of weights had 900 to 2,800 page faults per minibatch, 2 to 5 ms of its 30 ms. The number
differs between processes, since it depends on what lies above on the heap.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

# From glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST = 2**31 - 1  # the largest value for mallopt
# By default glibc adapts to freed blocks of that size, unless one of the two is set.
_LARGEST_BLOCK = 32 * 2**20


def _is_set_up() -> bool:
    """Return whether the environment configures the allocator of this process."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
    return any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )


@cache
def keep_freed_memory() -> None:
    """Make glibc keep up to 2 GB of freed memory for the next minibatch; once per process.

    The process's peak memory does not change. Does nothing if the environment configures glibc's
    allocator, or with another allocator.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None or _is_set_up():
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    mallopt(_M_TRIM_THRESHOLD, _MOST)
