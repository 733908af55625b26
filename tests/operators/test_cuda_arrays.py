"""Tests on which streams of a GPU arrays of CuPy and of DLPack's owners are read and written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.foreign_arrays import Hidden

import spectrain_ext as st

pytestmark = pytest.mark.cuda


@pytest.fixture(name="cupy")
def _cupy() -> Any:
    cupy = pytest.importorskip("cupy", reason="needs CuPy (the extra 'cupy')")
    cupy.cuda.Device(0).use()
    return cupy


def _zeros() -> torch.Tensor:
    new = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    return new


def _late(stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    """Fill a tensor with ones on a stream that is busy for a while first."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        tensor.fill_(1.0)


def test_the_current_stream_of_cupy_is_used(cupy: Any) -> None:
    side, v, w = torch.cuda.Stream(), _zeros(), cupy.zeros(1000, cupy.float32)
    cupy.cuda.Device().synchronize()
    _late(side, v)
    with cupy.cuda.ExternalStream(side.cuda_stream):
        st.predict_(w, cupy.from_dlpack(v), lr=1.0, steps=1.0)
    side.synchronize()
    assert bool((w == -1).all())


def test_a_stream_of_cupy_can_be_given(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    w, v = _zeros(), _zeros() + 1
    torch.cuda.synchronize()
    st.predict_(w, v, lr=1.0, steps=1.0, stream=stream)
    stream.synchronize()
    assert bool((w == -1).all())


def test_cupys_arrays_beside_tensors(cupy: Any) -> None:
    w = [_zeros(), cupy.zeros(1000, cupy.float32)]
    v = [cupy.ones(1000, cupy.float32), _zeros() + 1]
    st.predict_(w, v, lr=1.0, steps=2.0)
    assert bool((w[0] == -2).all()) and bool((w[1] == -2).all())
    assert w[0]._version == 1


def test_work_on_cupys_stream_comes_before_a_call_on_torchs(cupy: Any) -> None:
    """The owner receives the stream and makes it wait; the CPU does not wait."""
    side, values, w = torch.cuda.Stream(), _zeros(), _zeros()
    with cupy.cuda.ExternalStream(side.cuda_stream):
        v = cupy.from_dlpack(values)
        _late(side, values)
        st.predict_(w, v, lr=1.0, steps=1.0)  # torch's current stream, also w's
    torch.cuda.current_stream().synchronize()
    assert bool((w == -1).all())


def test_a_plan_keeps_cupys_memory(cupy: Any) -> None:
    w, v = cupy.zeros(1000, cupy.float32), cupy.ones(1000, cupy.float32)
    plan = st.Plan(w, momentum_buffers=v)
    del v
    filler = [cupy.full(1000, 7, cupy.float32) for _ in range(8)]
    plan.predict_(lr=1.0, steps=1.0)
    assert bool((w == -1).all()) and len(filler) == 8


def test_operators_can_be_captured_by_cupy(cupy: Any) -> None:
    w, v = cupy.zeros(1000, cupy.float32), cupy.ones(1000, cupy.float32)
    plan = st.Plan(w, momentum_buffers=v)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        plan.predict_(lr=0.0, steps=1.0)  # resolves its table outside the capture
        stream.begin_capture()
        plan.predict_(lr=1.0, steps=1.0)
        graph = stream.end_capture()
        graph.launch(stream)
        graph.launch(stream)
    stream.synchronize()
    assert bool((w == -2).all())


def test_the_stream_of_an_owner_comes_first() -> None:
    """A call on another stream waits for the owner's stream, without a wait of the CPU."""
    side, w, v = torch.cuda.Stream(), _zeros(), _zeros()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            _late(side, v)
            st.predict_(Hidden(w), Hidden(v), lr=1.0, steps=1.0)  # torch's current stream: side
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert bool((w == -1).all())
