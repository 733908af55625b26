"""Heap: what is freed is there again at the next minibatch, without page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import sys

import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext.operators.heap import keep_freed_memory


def faults():
    '''Page faults of getting 128 MB in blocks of 256 KB, after as many were freed.'''
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(2**16) for _ in range(512)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


torch.set_num_threads(1)
found = [faults()]
if sys.argv[1] == "keep":
    keep_freed_memory()
else:
    pipe = st.Pipeline(
        [nn.Linear(2, 2)], lambda p: st.optim.SGD(p, lr=0.1), nn.functional.mse_loss, "vanilla"
    )
found.append(faults())
print(*found)
"""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc's allocator"),
]


def faults(how: str, **environment: str) -> tuple[int, int]:
    """Before and after."""
    kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    kept.pop("GLIBC_TUNABLES", None)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    before, after = map(int, run.stdout.split())
    return before, after


@pytest.mark.parametrize("how", ["keep", "pipeline"])
def test_freed_memory_is_kept(how: str) -> None:
    before, after = faults(how)
    assert before > 10_000  # of 32,768 pages; or this test says nothing
    assert after < 400


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_the_environment_says_stays(environment: dict[str, str]) -> None:
    assert faults("keep", **environment)[1] > 10_000
