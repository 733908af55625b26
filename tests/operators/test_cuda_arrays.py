"""Tests CuPy arrays and DLPack on a GPU, together with torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spectrain_ext as st

pytestmark = pytest.mark.cuda


@pytest.fixture(name="cupy")
def _cupy() -> Any:
    cupy = pytest.importorskip("cupy", reason="needs CuPy (the extra 'cupy')")
    cupy.cuda.Device(0).use()
    return cupy


class _Hidden:
    """A tensor whose owner supports only DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def _late(stream: torch.cuda.Stream, tensor: torch.Tensor, value: float) -> None:
    """Fill a tensor on a stream that is busy for a while first."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        tensor.fill_(value)


Call = Callable[[Any, Any, Any, Any], Any]
_CALLS: dict[str, Call] = {
    "predict_": lambda a, b, c, d: st.predict_(a, b, lr=0.1, steps=2.0),
    "predict": lambda a, b, c, d: st.predict(a, b, lr=0.1, steps=2.0),
    "stash": lambda a, b, c, d: st.stash(a),
    "swap_": lambda a, b, c, d: st.swap_(a, b),
    "stash_predict_": lambda a, b, c, d: st.stash_predict_(a, b, c, lr=0.1, steps=1.0),
    "sgd_step_": lambda a, b, c, d: st.sgd_step_(a, b, c, lr=0.1, momentum=0.9, predict=[(2.0, d)]),
    "adam_step_": lambda a, b, c, d: st.adam_step_(a, b, c, d, lr=0.1, step=2),
    "extrapolate": lambda a, b, c, d: st.extrapolate(a, b, steps=2.0),
}


class TestCuPy:
    """Zero-copy, on CuPy's current stream."""

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("name", _CALLS)
    def test_the_bits_of_tensors(self, cupy: Any, name: str, dtype: Any) -> None:
        rng = np.random.default_rng(0)
        shapes = [(5, 7), (), (0, 3), (1000,), (2, 3, 4)]
        host = [[np.asarray(rng.random(s)).astype(dtype) for s in shapes] for _ in range(4)]
        for arrays in host:
            arrays.append(np.asfortranarray(arrays[-1]))
        arrays = [[cupy.array(a, order="K") for a in given] for given in host]
        tensors = [[torch.from_numpy(a.copy(order="K")).cuda() for a in given] for given in host]
        new, expected = _CALLS[name](*arrays), _CALLS[name](*tensors)
        for given, wanted in zip(arrays, tensors, strict=True):
            for a, t in zip(given, wanted, strict=True):
                np.testing.assert_array_equal(cupy.asnumpy(a), t.cpu().numpy())
        assert (new is None) == (expected is None)
        for a, t, like in zip(new or [], expected or [], arrays[0], strict=False):
            assert isinstance(a, cupy.ndarray) and (a.strides == like.strides or not a.size)
            np.testing.assert_array_equal(cupy.asnumpy(a), t.cpu().numpy())

    def test_its_current_stream_is_used(self, cupy: Any) -> None:
        side = torch.cuda.Stream()
        v = torch.zeros(1000, device="cuda")
        w = cupy.zeros(1000, cupy.float32)
        torch.cuda.synchronize()
        _late(side, v, 1.0)
        with cupy.cuda.ExternalStream(side.cuda_stream):
            st.predict_(w, cupy.from_dlpack(v), lr=1.0, steps=1.0)
        side.synchronize()
        assert bool((w == -1).all())

    def test_a_stream_of_cupy_can_be_given(self, cupy: Any) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        w, v = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        st.predict_(w, v, lr=1.0, steps=1.0, stream=stream)
        stream.synchronize()
        assert bool((w == -1).all())

    def test_mixed_with_tensors(self, cupy: Any) -> None:
        w = [torch.zeros(100, device="cuda"), cupy.zeros(100, cupy.float32)]
        v = [cupy.ones(100, cupy.float32), torch.ones(100, device="cuda")]
        st.predict_(w, v, lr=1.0, steps=2.0)
        assert bool((w[0] == -2).all()) and bool((w[1] == -2).all())
        assert w[0]._version == 1

    def test_work_on_cupys_stream_comes_before_a_call_on_torchs(self, cupy: Any) -> None:
        """The owner receives the stream and makes it wait; the CPU does not wait."""
        side = torch.cuda.Stream()
        values = torch.zeros(1000, device="cuda")
        w = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with cupy.cuda.ExternalStream(side.cuda_stream):
            v = cupy.from_dlpack(values)
            _late(side, values, 1.0)
            st.predict_(w, v, lr=1.0, steps=1.0)  # torch's current stream, also w's
        torch.cuda.current_stream().synchronize()
        assert bool((w == -1).all())

    def test_a_plan_keeps_the_memory(self, cupy: Any) -> None:
        w, v = cupy.zeros(1000, cupy.float32), cupy.ones(1000, cupy.float32)
        plan = st.Plan(w, momentum_buffers=v)
        del v
        filler = [cupy.full(1000, 7, cupy.float32) for _ in range(8)]
        plan.predict_(lr=1.0, steps=1.0)
        assert bool((w == -1).all()) and len(filler) == 8

    def test_operators_can_be_captured(self, cupy: Any) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dlpack_on_the_device(dtype: torch.dtype) -> None:
    w, v = torch.zeros(1000, dtype=dtype, device="cuda"), torch.ones(1000, dtype=dtype).cuda()
    st.predict_(_Hidden(w), _Hidden(v), lr=1.0, steps=2.0)
    st.predict_([w], [_Hidden(v)], lr=1.0, steps=2.0)
    assert bool((w == -4).all())


def test_the_owners_stream_comes_first() -> None:
    """A call on another stream waits for the owner's stream, without a wait of the CPU."""
    side = torch.cuda.Stream()
    w, v = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            _late(side, v, 1.0)
            st.predict_(_Hidden(w), _Hidden(v), lr=1.0, steps=1.0)  # torch's current stream: side
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert bool((w == -1).all())


def test_compiled_operators() -> None:
    def step(w: list[torch.Tensor], v: list[torch.Tensor], lr: float) -> torch.Tensor:
        g = [t * 2 for t in w]
        st.sgd_step_(w, g, v, lr=lr, momentum=0.9)
        return st.predict(w[0], v[0], lr=lr, steps=2)

    given = [[torch.rand(100, device="cuda") for _ in range(3)] for _ in range(2)]
    copies = [[t.clone() for t in tensors] for tensors in given]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for lr in (0.1, 0.2, 0.3):
        assert torch.equal(compiled(*given, lr), step(*copies, lr))
    assert all(torch.equal(a, b) for a, b in zip(given[0], copies[0], strict=True))
