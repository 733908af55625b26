"""Tests a machine without a usable GPU: the CPU works, and CUDA gives one clear error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext import _C

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_asking_the_native_module_for_cuda() -> None:
    with pytest.raises(RuntimeError) as caught:
        _C.require_cuda()
    message = str(caught.value)
    assert "CUDA" in message and "\n" not in message
    if _C.build_info()["cuda"]:
        assert "driver" in message or "device" in message
    else:
        assert "SPECTRAIN_CUDA=1" in message, "the remedy"


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda", "cpu"]])
def test_a_pipeline_that_is_refused_leaves_the_modules_alone(devices: list[str]) -> None:
    stages = [nn.Linear(3, 3), nn.Linear(3, 3)]
    before = [(p, p.data_ptr(), p.detach().clone()) for s in stages for p in s.parameters()]
    with pytest.raises(RuntimeError, match=r"cuda|CUDA"):
        st.Pipeline(
            stages,
            optimizer=lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9),
            loss_fn=nn.functional.mse_loss,
            devices=devices,
        )
    after = [p for s in stages for p in s.parameters()]
    for (p, address, value), now in zip(before, after, strict=True):
        assert now is p and now.data_ptr() == address and torch.equal(now, value)
