"""Tests that memory stays constant when plans are made, used and rejected repeatedly."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a separate process, whose peak memory is that of these calls.
_PROGRAM = """
import resource
import sys

import torch
import spectrain_ext as st

torch.set_num_threads(1)
w, v, g, out = ([torch.randn(n) for n in (3, 64)] for _ in range(4))
plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
single = torch.nn.Parameter(torch.randn(8))


def use(calls):
    for i in range(calls):
        plan.predict(lr=0.1, steps=2.0)
        plan.sgd_step_(lr=0.0, momentum=0.9, predict=(1.0,))
        if i % 10 == 0:  # what looks at every array again
            st.predict(w, v, lr=0.1, steps=1.0)
            single.grad = torch.ones(8)
            st.Plan(single, momentum_buffers=torch.zeros(8)).refresh()
            try:
                st.predict_(w, [v[0], v[0]], lr=0.1, steps=1.0)
            except ValueError:
                pass


use(2_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
use(int(sys.argv[1]))
assert not torch.cuda.is_initialized()  # a context would break forked workers
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "calls",
    [20_000, pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(2000)])],
)
def test_memory_does_not_grow(calls: int) -> None:
    """A small object lost per call would take 64 bytes or more, 1.25 MiB in the short run.

    Calls on the CPU make no CUDA context either.
    """
    command = [sys.executable, "-c", _PROGRAM, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1024, "KiB"
