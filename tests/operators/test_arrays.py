"""Tests CPU arrays of any framework: NumPy, buffers, DLPack capsules, and their ownership."""

from __future__ import annotations

import array
import gc
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_arrays import CudaInterface, CudaProducer, Producer, Refuses

import spectrain_ext as st

_HAS_CUPY = importlib.util.find_spec("cupy") is not None
TYPES = [np.float16, np.float32, np.float64]


def _arrays(count: int, dtype: Any = np.float32, seed: int = 0) -> list[list[np.ndarray]]:
    """Return lists of arrays, including Fortran order, no dimensions, and an empty one."""
    rng = np.random.default_rng(seed)

    def one() -> list[np.ndarray]:
        shapes = [(3, 5), (), (0, 2), (37,), (2, 3, 4)]
        new = [np.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes]
        return [*new, np.asfortranarray(new[-1])]

    return [one() for _ in range(count)]


def _tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    """Return copies of the arrays as tensors with the same strides."""
    return [torch.from_numpy(a.copy(order="K")) for a in arrays]


Call = Callable[[Any, Any, Any, Any], Any]
OPERATORS: dict[str, Call] = {
    "predict_": lambda a, b, c, d: st.predict_(a, b, lr=0.1, steps=2.0),
    "predict": lambda a, b, c, d: st.predict(a, b, lr=0.1, steps=2.0),
    "predict out": lambda a, b, c, d: st.predict(a, b, lr=0.1, steps=2.0, out=c),
    "stash": lambda a, b, c, d: st.stash(a),
    "restore_": lambda a, b, c, d: st.restore_(a, b),
    "swap_": lambda a, b, c, d: st.swap_(a, b),
    "stash_predict_": lambda a, b, c, d: st.stash_predict_(a, b, c, lr=0.1, steps=1.0),
    "sgd_step_": lambda a, b, c, d: st.sgd_step_(
        a, b, c, lr=0.1, momentum=0.9, weight_decay=0.01, predict=[(2.0, d)]
    ),
    "adam_step_": lambda a, b, c, d: st.adam_step_(a, b, c, d, lr=0.1, step=2),
    "adam_predict": lambda a, b, c, d: st.adam_predict(a, b, c, lr=0.1, step=2, steps=3.0),
    "extrapolate": lambda a, b, c, d: st.extrapolate(a, b, steps=2.0),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_numpy_arrays_give_the_bits_of_tensors(name: str, dtype: Any) -> None:
    arrays = _arrays(4, dtype)
    for squares in arrays[2:]:  # second moments are not negative
        for a in squares:
            np.abs(a, out=a)
    tensors = [_tensors(given) for given in arrays]
    new = OPERATORS[name](*arrays)
    expected = OPERATORS[name](*tensors)
    for given, wanted in zip(arrays, tensors, strict=True):
        for a, t in zip(given, wanted, strict=True):
            np.testing.assert_array_equal(a, t.numpy())
    assert (new is None) == (expected is None)
    for a, t, like in zip(new or [], expected or [], arrays[0], strict=False):
        assert type(a) is np.ndarray and a.dtype == dtype and a.strides == like.strides
        np.testing.assert_array_equal(a, t.numpy())


def test_one_array_is_one_tensor() -> None:
    w, v = np.zeros((4, 3), np.float32), np.ones((4, 3), np.float32)
    hat = st.predict(w, v, lr=0.1, steps=2.0)
    assert isinstance(hat, np.ndarray) and hat.shape == (4, 3)
    assert np.all(hat == np.float32(-0.2)) and not w.any()
    with pytest.raises(TypeError, match=r"momentum_buffers: expected one tensor"):
        st.predict_(w, [v], lr=0.1, steps=2.0)


def test_frameworks_mix_in_one_call() -> None:
    w = [torch.zeros(3), np.zeros(3, np.float32), array.array("f", [0.0] * 3)]
    v = [np.ones(3, np.float32), Producer(np.ones(3, np.float32)), torch.ones(3)]
    st.predict_(w, v, lr=1.0, steps=2.0)
    assert all(list(x) == [-2.0] * 3 for x in w)
    assert w[0]._version == 1 and v[2]._version == 0


def test_new_outputs_belong_to_the_framework_of_their_parameter(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "w", dtype=np.float32, mode="w+", shape=(3,))
    new = st.stash([torch.ones(2), np.ones(2, np.float32), mapped])
    assert [type(x) for x in new] == [torch.Tensor, np.ndarray, np.ndarray]
    with pytest.raises(TypeError, match=r"params\[1\]: expected a tensor, or a NumPy or CuPy.*out"):
        st.stash([np.ones(2, np.float32), array.array("f", [1.0])])


class TestReadOnly:
    """Read-only memory."""

    def test_an_input_may_be(self) -> None:
        w, v = np.zeros(3, np.float32), np.ones(3, np.float32)
        v.flags.writeable = False
        st.predict_(w, v, lr=1.0, steps=1.0)
        assert w.tolist() == [-1.0] * 3
        st.predict_([w], [Producer(np.ones(3, np.float32), read_only=True)], lr=1.0, steps=1.0)
        assert w.tolist() == [-2.0] * 3
        assert st.predict(v, w, lr=1.0, steps=1.0).tolist() == [3.0] * 3

    @pytest.mark.parametrize("kind", ["numpy", "memoryview", "capsule"])
    def test_an_output_may_not(self, kind: str) -> None:
        kept = np.zeros(3, np.float32)
        frozen = kept.view()
        frozen.flags.writeable = False
        given: Any = {
            "numpy": lambda: frozen,
            "memoryview": lambda: memoryview(frozen),
            "capsule": lambda: Producer(kept, read_only=True),
        }[kind]()
        ok, v = np.zeros(3, np.float32), np.ones(3, np.float32)
        with pytest.raises(ValueError, match=r"params\[1\]: .*read-only"):
            st.predict_([ok, given], [v, v.copy()], lr=1.0, steps=1.0)
        with pytest.raises(ValueError, match=r"^out: .*read-only"):
            st.predict(ok, v, lr=1.0, steps=1.0, out=given)
        with pytest.raises(ValueError, match=r"predict\[0\].out\[0\]: .*read-only"):
            st.sgd_step_([ok], [v], [v.copy()], lr=1.0, momentum=0.9, predict=[(1.0, [given])])
        assert not kept.any() and not ok.any()


class TestCapsules:
    """Capsules are consumed as the protocol requires, kept by the plan, and released once."""

    @pytest.mark.parametrize("versioned", [True, False])
    def test_taken_and_given_back(self, versioned: bool) -> None:
        w = Producer(np.zeros((2, 3), np.float32), versioned=versioned)
        v = Producer(np.ones((2, 3), np.float32), versioned=versioned)
        st.predict_(w, v, lr=1.0, steps=2.0)
        assert (w.array == -2.0).all()
        name = "used_dltensor_versioned" if versioned else "used_dltensor"
        assert w.names == v.names == [name]
        assert w.returned == v.returned == 1
        assert w.asked == [{"max_version": (1, 0)} if versioned else {}]

    def test_a_plan_keeps_them(self) -> None:
        w, v, kept, out = (Producer(np.ones(3, np.float32)) for _ in range(4))
        plan = st.Plan(w, momentum_buffers=v, stashed=kept, outs=[out])
        plan.predict(lr=1.0, steps=1.0)
        plan.predict_(lr=1.0, steps=1.0)
        gc.collect()
        assert [p.returned for p in (w, v, kept, out)] == [0] * 4
        assert out.array.tolist() == w.array.tolist() == [0.0] * 3
        del plan
        assert [p.returned for p in (w, v, kept, out)] == [1] * 4

    def test_gradients_go_when_others_come(self) -> None:
        w, v = np.zeros(3, np.float32), np.zeros(3, np.float32)
        first, second = (Producer(np.full(3, x, np.float32)) for x in (1.0, 2.0))
        plan = st.Plan(w, momentum_buffers=v, grads=first)
        plan.sgd_step_(lr=1.0, momentum=0.5)
        plan.refresh(second)
        assert (first.returned, second.returned) == (1, 0)
        plan.sgd_step_(lr=1.0, momentum=0.5)
        assert v.tolist() == [2.5] * 3
        plan.refresh()  # reads the address of the same array again
        assert (len(second.lent), second.returned) == (2, 1)
        bad = Producer(np.zeros(4, np.float32))
        with pytest.raises(ValueError, match="grads"):
            plan.refresh(bad)
        assert (bad.returned, second.returned) == (1, 1)
        del plan
        assert second.returned == 2

    def test_given_back_after_an_error(self) -> None:
        w, v = Producer(np.zeros(3, np.float32)), Producer(np.zeros(4, np.float32))
        other = Producer(np.zeros(3, np.float64))
        with pytest.raises(ValueError, match=r"momentum_buffers: expected shape"):
            st.predict_(w, v, lr=1.0, steps=1.0)
        with pytest.raises(ValueError, match=r"momentum_buffers\[0\]: expected float32"):
            st.predict_([w], [other], lr=1.0, steps=1.0)
        assert (w.returned, v.returned, other.returned) == (2, 1, 1)

    def test_one_that_is_not_of_this_version(self) -> None:
        w = Producer(np.zeros(3, np.float32), major=2)
        with pytest.raises(TypeError, match="params: expected DLPack version 1, got 2"):
            st.stash(w, np.zeros(3, np.float32))
        assert w.returned == 1

    def test_without_strides_or_deleter(self) -> None:
        w = np.arange(6, dtype=np.float32).reshape(2, 3)
        out = np.zeros_like(w)
        st.stash(Producer(w, strides=False, deleter=False), out)
        assert (out == w).all()
        transposed = np.zeros((3, 2), np.float32).T
        with pytest.raises(ValueError, match=r"out: expected strides \(3, 1\)"):
            st.stash(Producer(w, strides=False), transposed)

    def test_an_offset_in_bytes(self) -> None:
        w = np.arange(8, dtype=np.float32)
        out = np.zeros(4, np.float32)
        st.stash(Producer(w[4:], byte_offset=16), out)
        assert out.tolist() == [4.0, 5.0, 6.0, 7.0]

    @pytest.mark.parametrize(
        "error", [BufferError("no\nand why"), TypeError("no"), RuntimeError("no")]
    )
    def test_an_owner_that_refuses(self, error: Exception) -> None:
        with pytest.raises(TypeError, match=r"^params\[0\]: .*Refuses: no$"):
            st.stash([Refuses(lambda: error)], [np.zeros(3, np.float32)])

    def test_no_capsule(self) -> None:
        class Wrong:
            def __dlpack__(self, **_: Any) -> int:
                return 3

        with pytest.raises(TypeError, match=r"params: expected a DLPack capsule.*3"):
            st.stash(Wrong(), np.zeros(3, np.float32))

    def test_a_tensor_through_the_protocol(self) -> None:
        """A tensor exported by torch, from an owner that hides its type."""

        class Owner:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.tensor = tensor

            def __dlpack__(self, **arguments: Any) -> Any:
                return self.tensor.__dlpack__(**arguments)

            def __dlpack_device__(self) -> Any:
                return self.tensor.__dlpack_device__()

        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            w = torch.zeros(3, 4, dtype=dtype)
            st.predict_(Owner(w), Owner(torch.ones(3, 4, dtype=dtype)), lr=1.0, steps=1.0)
            assert bool((w == -1).all())


class TestBuffers:
    @pytest.mark.parametrize("letter", ["f", "d"])
    def test_arrays_of_the_standard_library(self, letter: str) -> None:
        w, v = array.array(letter, [0.0] * 5), array.array(letter, [1.0] * 5)
        st.predict_(w, memoryview(v), lr=1.0, steps=2.0)
        assert w.tolist() == [-2.0] * 5

    def test_memory_is_held_while_a_plan_lives(self) -> None:
        w = array.array("f", [1.0] * 5)
        plan = st.Plan(w, stashed=np.zeros(5, np.float32))
        with pytest.raises(BufferError):
            w.append(1.0)
        del plan
        w.append(1.0)

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            (array.array("i", [1] * 3), "a buffer of format i"),
            (np.ones(3, np.int64), "int64"),
            (np.ones(3, np.complex64), "complex64"),
            (np.ones(3, ">f4"), ">f4"),
            (np.ones(3, np.longdouble), str(np.dtype(np.longdouble))),
            (b"weights", "a buffer of format B"),
        ],
        ids=["int", "numpy int", "complex", "other byte order", "long double", "bytes"],
    )
    def test_other_elements(self, given: Any, says: str) -> None:
        with pytest.raises(TypeError, match=rf"^params\[1\]: expected float16.*{re.escape(says)}$"):
            st.stash([np.ones(3, np.float32), given], [np.ones(3, np.float32)] * 2)

    def test_layouts_with_gaps(self) -> None:
        record = np.zeros(4, dtype=[("w", "<f8"), ("other", "<f4")])  # strides of 1.5 elements
        for given in (np.zeros(8, np.float32)[::2], record["w"], np.zeros(8, np.float32)[::-1]):
            with pytest.raises(ValueError, match=r"^params: expected a dense layout"):
                st.stash(given, given.copy())

    def test_misaligned_memory(self) -> None:
        raw = np.zeros(17, np.uint8)
        with pytest.raises(ValueError, match=r"^params: expected memory aligned .* 4 bytes"):
            st.stash(raw[1:].view(np.float32), np.zeros(4, np.float32))

    def test_overlap_is_seen_across_frameworks(self) -> None:
        w = np.zeros(4, np.float32)
        with pytest.raises(ValueError, match="overlap"):
            st.restore_(torch.from_numpy(w), w)


_asks_torch = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a CUDA build of torch has no stream of a device that is not there",
)


class TestCudaWithoutADevice:
    """Queries to owners on a GPU; nothing is launched."""

    @staticmethod
    def _cupy(monkeypatch: pytest.MonkeyPatch, handle: int) -> tuple[type, list[int]]:
        """Return a stand-in for CuPy, and the devices whose stream was queried."""
        asked: list[int] = []

        def get_current_stream(device: int) -> Any:
            asked.append(device)
            return types.SimpleNamespace(ptr=handle)

        module: Any = types.ModuleType("cupy")
        module.cuda = types.SimpleNamespace(get_current_stream=get_current_stream)
        monkeypatch.setitem(sys.modules, "cupy", module)
        return type("ndarray", (CudaProducer,), {"__module__": "cupy"}), asked

    @pytest.mark.parametrize(("handle", "passed"), [(0, 1), (2**40, 2**40)])
    def test_cupy_is_asked_for_its_own_stream(
        self, monkeypatch: pytest.MonkeyPatch, handle: int, passed: int
    ) -> None:
        """On its own stream, CuPy need not wait."""
        ndarray, asked = self._cupy(monkeypatch, handle)
        derived = type("derived", (ndarray,), {})
        w, v = ndarray(np.zeros(3, np.float16)), derived(np.ones(3, np.float16))
        plan = st.Plan(w, momentum_buffers=v)
        assert [x.asked for x in (w, v)] == [[{"stream": passed, "max_version": (1, 0)}]] * 2
        assert set(asked) == {0}
        del plan
        assert w.returned == v.returned == 1

    @_asks_torch
    def test_an_owner_without_streams_gets_torchs(self) -> None:
        w = CudaProducer(np.zeros(3, np.float32), versioned=False)
        st.Plan(w)
        assert w.asked == [{"stream": 1}]

    @_asks_torch
    def test_one_device_a_call(self) -> None:
        w, v = CudaProducer(np.zeros(3, np.float32)), np.zeros(3, np.float32)
        with pytest.raises(ValueError, match=r"momentum_buffers: .*cuda:0.*got cpu"):
            st.predict_(w, v, lr=1.0, steps=1.0)

    def test_the_cuda_array_interface_is_taken(self) -> None:
        st.Plan(CudaInterface(), grads=CudaInterface(data=(0x2000, True)))
        st.Plan([CudaInterface(shape=(2, 2), strides=(4, 8), typestr="<f4")])

    @pytest.mark.parametrize(
        ("changes", "error", "says"),
        [
            ({"typestr": "<f2"}, TypeError, "float16 or bfloat16"),
            ({"typestr": "<i4"}, TypeError, "expected float32 or float64, got <i4"),
            ({"typestr": ">f4"}, TypeError, "expected float32 or float64, got >f4"),
            ({"mask": ...}, TypeError, "mask"),
            ({"strides": (8,)}, ValueError, "dense"),
            ({"strides": (6,)}, ValueError, "dense"),
            ({"strides": (4, 4)}, TypeError, "strides"),
            ({"data": (0x1000, True)}, ValueError, "read-only"),
        ],
        ids=lambda x: str(x) if isinstance(x, dict) else "",
    )
    def test_what_that_interface_may_not_say(
        self, changes: dict[str, Any], error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=rf"^params: .*{says}"):
            st.Plan(CudaInterface(**changes))
