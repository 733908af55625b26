"""Tests a machine without a usable GPU: the CPU works, and CUDA gives one clear error."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext import _C

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def _pipeline(devices: list[str]) -> st.Pipeline:
    return st.Pipeline(
        [nn.Linear(3, 3), nn.Linear(3, 3)],
        optimizer=lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9),
        loss_fn=nn.functional.mse_loss,
        devices=devices,
    )


@needs_no_gpu
def test_asking_the_native_module_for_cuda() -> None:
    with pytest.raises(RuntimeError) as caught:
        _C.require_cuda()
    message = str(caught.value)
    assert "CUDA" in message and "\n" not in message
    if _C.build_info()["cuda"]:
        assert "driver" in message or "device" in message
    else:
        assert "SPECTRAIN_CUDA=1" in message, "the remedy"


@needs_no_gpu
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda", "cpu"]])
def test_asking_a_pipeline_for_cuda(devices: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"cuda|CUDA"):
        _pipeline(devices)


@needs_no_gpu
def test_a_refused_pipeline_leaves_the_modules_alone() -> None:
    stages = [nn.Linear(3, 3), nn.Linear(3, 3)]
    before = [(p, p.data_ptr(), p.detach().clone()) for s in stages for p in s.parameters()]
    with pytest.raises(RuntimeError):
        st.Pipeline(
            stages,
            optimizer=lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9),
            loss_fn=nn.functional.mse_loss,
            devices=["cpu", "cuda:0"],
        )
    after = [p for s in stages for p in s.parameters()]
    for (p, address, value), now in zip(before, after, strict=True):
        assert now is p and now.data_ptr() == address and torch.equal(now, value)


@needs_no_gpu
def test_the_cpu_ignores_a_stream() -> None:
    """One program serves both: CPU tensors ignore a stream."""
    w = torch.zeros(3)
    st.predict_(w, torch.ones(3), lr=1.0, steps=1.0, stream=None)
    assert w.tolist() == [-1.0] * 3


@pytest.mark.processes
def test_import_touches_no_gpu() -> None:
    """Importing must not create a CUDA context: it would break forked workers."""
    code = (
        "import torch, spectrain_ext as st\n"
        "st.predict_(torch.zeros(3), torch.ones(3), lr=1.0, steps=1.0)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
