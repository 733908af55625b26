"""Tests CPU arrays of any framework: NumPy, DLPack capsules, and their ownership."""

from __future__ import annotations

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
from helpers.foreign_arrays import CudaProducer, Producer, Refuses

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
    w = [torch.zeros(3), np.zeros(3, np.float32), Producer(np.zeros(3, np.float32))]
    v = [np.ones(3, np.float32), Producer(np.ones(3, np.float32)), torch.ones(3)]
    st.predict_(w, v, lr=1.0, steps=2.0)
    assert all(x.tolist() == [-2.0] * 3 for x in (w[0], w[1], w[2].array))
    assert w[0]._version == 1 and v[2]._version == 0


def test_new_outputs_belong_to_the_framework_of_their_parameter(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "w", dtype=np.float32, mode="w+", shape=(3,))
    new = st.stash([torch.ones(2), np.ones(2, np.float32), mapped])
    assert [type(x) for x in new] == [torch.Tensor, np.ndarray, np.ndarray]
    with pytest.raises(TypeError, match=r"params\[1\]: expected a tensor, or a NumPy or CuPy.*out"):
        st.stash([np.ones(2, np.float32), Producer(np.ones(2, np.float32))])


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

    @pytest.mark.parametrize("kind", ["numpy", "capsule"])
    def test_an_output_may_not(self, kind: str) -> None:
        kept = np.zeros(3, np.float32)
        frozen = kept.view()
        frozen.flags.writeable = False
        given: Any = {
            "numpy": lambda: frozen,
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

    @pytest.mark.parametrize("writes", [True, False])
    def test_an_owner_whose_capsules_cannot_say_so(self, writes: bool) -> None:
        """NumPy before 2.1 exports no read-only array."""
        why = "Cannot export readonly array since signalling readonly is unsupported by DLPack."
        frozen = Refuses(lambda: BufferError(why))
        ok, other = (np.zeros(3, np.float32) for _ in range(2))
        arrays = ([ok, frozen], [other, ok]) if writes else ([ok, other], [ok, frozen])
        said = r"\[1\]: expected a writable array, got a read-only one: Cannot export readonly"
        with pytest.raises(ValueError, match=("params" if writes else "stashed") + said):
            st.restore_(*arrays)


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


class TestNumPy:
    @pytest.mark.parametrize(
        ("given", "says"),
        [
            (np.ones(3, np.int64), "int64"),
            (np.ones(3, np.complex64), "complex64"),
        ],
        ids=["int", "complex"],
    )
    def test_other_elements(self, given: Any, says: str) -> None:
        with pytest.raises(TypeError, match=rf"^params\[1\]: expected float16.*{re.escape(says)}$"):
            st.stash([np.ones(3, np.float32), given], [np.ones(3, np.float32)] * 2)

    @pytest.mark.parametrize(
        "given",
        [
            np.ones(3, ">f4"),
            np.ones(3, np.longdouble),
            np.zeros(3, dtype=[("w", "<f8"), ("other", "<f4")])["w"],  # strides of 1.5 elements
        ],
        ids=["other byte order", "long double", "uneven strides"],
    )
    def test_what_dlpack_cannot_describe(self, given: Any) -> None:
        says = r"^params\[1\]: expected a dense tensor.*, got numpy.ndarray: DLPack only supports"
        with pytest.raises(TypeError, match=says):
            st.stash([np.ones(3, np.float32), given], [np.ones(3, np.float32)] * 2)

    @pytest.mark.parametrize(
        "given", [memoryview(b"weights!"), 0.5, "weights"], ids=lambda given: type(given).__name__
    )
    def test_no_array(self, given: Any) -> None:
        with pytest.raises(TypeError, match=r"^params\[0\]: expected a tensor or an array with"):
            st.stash([given], [np.ones(3, np.float32)])

    def test_layouts_with_gaps(self) -> None:
        for given in (np.zeros(8, np.float32)[::2], np.zeros(8, np.float32)[::-1]):
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
