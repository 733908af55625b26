"""Tests arrays of any framework: NumPy, CuPy, DLPack capsules, and their ownership."""

from __future__ import annotations

import gc
import importlib
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_arrays import CUDA, Hidden, Producer, Refuses
from helpers.operator_table import OPS, Op
from torch import Tensor

import spectrain_ext as st

ON_CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


def ones(n: int = 3) -> np.ndarray:
    return np.ones(n, np.float32)


def zeros(n: int = 3) -> np.ndarray:
    return np.zeros(n, np.float32)


def _host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
def test_arrays_have_the_bits_of_tensors(op: Op, device: str, dtype: Any) -> None:
    """Also in Fortran order, without dimensions, and without elements."""
    if device == "cuda":
        pytest.importorskip("cupy", reason="needs CuPy (the extra 'cupy')")
    module: Any = importlib.import_module("cupy" if device == "cuda" else "numpy")
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (), (0, 2), (1000,), (2, 3, 4)]
    arrays, tensors = {}, {}
    for name in op.lists:
        host = [np.asarray(rng.random(shape)).astype(dtype) for shape in shapes]
        host.append(np.asfortranarray(host[-1]))
        arrays[name] = [module.array(a, order="K") for a in host]
        tensors[name] = [torch.from_numpy(a).to(device) for a in host]
    if "out" in op.lists:
        without = {name: given for name, given in arrays.items() if name != "out"}
        new = op(without)
        for a, like in zip(new, arrays["params"], strict=True):
            assert type(a) is module.ndarray and a.dtype == dtype
            assert a.strides == like.strides or not a.size
        op(tensors)
        op(arrays)
        np.testing.assert_equal([_host(a) for a in new], [_host(a) for a in arrays["out"]])
    else:
        assert op(arrays) is None and op(tensors) is None
    for name in op.lists:
        for a, t in zip(arrays[name], tensors[name], strict=True):
            np.testing.assert_array_equal(_host(a), t.cpu().numpy())


def test_frameworks_mix_in_one_call() -> None:
    w = [torch.zeros(3), zeros(), Producer(zeros())]
    v = [ones(), Producer(ones()), torch.ones(3)]
    st.predict_(w, v, lr=1.0, steps=2.0)
    assert all(x.tolist() == [-2.0] * 3 for x in (w[0], w[1], w[2].array))
    assert w[0]._version == 1 and v[2]._version == 0
    shared = zeros()
    with pytest.raises(ValueError, match="overlap"):
        st.restore_(torch.from_numpy(shared), shared)


def test_new_outputs_belong_to_the_framework_of_their_parameter(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "w", dtype=np.float32, mode="w+", shape=(3,))
    new = st.stash([torch.ones(2), ones(), mapped])
    assert [type(x) for x in new] == [torch.Tensor, np.ndarray, np.ndarray]
    with pytest.raises(TypeError, match=r"params\[1\]: expected a tensor, or a NumPy or CuPy.*out"):
        st.stash([ones(), Producer(ones())])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_distances_of_arrays(dtype: Any) -> None:
    now, other = (np.random.default_rng(k).standard_normal((2, 3, 5)).astype(dtype) for k in (0, 1))
    each, total = st.distance(torch.from_numpy(now), [torch.from_numpy(other)])
    now.flags.writeable = False  # it is only read
    found = st.distance(list(now), [list(other), [torch.from_numpy(a) for a in other]])
    for norms in found:
        assert type(norms) is np.ndarray and norms.dtype == np.float64
    assert found[0].shape == (2, 2)
    assert found[1].tolist() == [total.item()] * 2
    assert math.hypot(*found[0][0]) == pytest.approx(each.item(), rel=1e-14)
    assert isinstance(st.distance(now, [other])[1], np.ndarray)
    norm = st.distance([Producer(now.copy())], [[other]])[1]  # of no known framework
    assert isinstance(norm, Tensor) and norm.item() == pytest.approx(total.item(), rel=1e-14)


class TestReadOnly:
    def test_an_input_may_be(self) -> None:
        w, v = zeros(), ones()
        v.flags.writeable = False
        st.predict_(w, v, lr=1.0, steps=1.0)
        st.predict_([w], [Producer(ones(), read_only=True)], lr=1.0, steps=1.0)
        assert st.predict(v, w, lr=1.0, steps=1.0).tolist() == [3.0] * 3

    @pytest.mark.parametrize("capsule", [False, True])
    def test_an_output_may_not(self, capsule: bool) -> None:
        kept, ok, v = zeros(), zeros(), ones()
        view = kept.view()
        view.flags.writeable = False
        given: Any = Producer(kept, read_only=True) if capsule else view
        with pytest.raises(ValueError, match=r"params\[1\]: .*read-only"):
            st.predict_([ok, given], [v, v.copy()], lr=1.0, steps=1.0)
        with pytest.raises(ValueError, match=r"^out: .*read-only"):
            st.predict(ok, v, lr=1.0, steps=1.0, out=given)
        with pytest.raises(ValueError, match=r"predict\[0\].out\[0\]: .*read-only"):
            st.sgd_step_([ok], [v], [v.copy()], lr=1.0, momentum=0.9, predict=[(1.0, [given])])
        assert not kept.any() and not ok.any()

    @pytest.mark.parametrize("name", ["params", "stashed"])
    def test_an_owner_whose_capsules_cannot_say_so(self, name: str) -> None:
        """NumPy before 2.1 exports no read-only array."""
        why = "Cannot export readonly array since signalling readonly is unsupported by DLPack."
        lists: Any = {"params": [zeros(), zeros()], "stashed": [zeros(), zeros()]}
        lists[name][1] = Refuses(BufferError(why))
        said = r"\[1\]: expected a writable array, got a read-only one: Cannot export readonly"
        with pytest.raises(ValueError, match=name + said):
            st.restore_(**lists)


class TestCapsules:
    """Capsules are consumed as the protocol requires, kept by the plan, and released once."""

    @pytest.mark.parametrize("versioned", [True, False])
    def test_taken_and_given_back(self, versioned: bool) -> None:
        w, v = (Producer(a.reshape(1, 3), versioned=versioned) for a in (zeros(), ones()))
        st.predict_(w, v, lr=1.0, steps=2.0)
        assert (w.array == -2.0).all()
        name = "used_dltensor_versioned" if versioned else "used_dltensor"
        assert w.names == v.names == [name]
        assert w.returned == v.returned == 1
        assert w.asked == [{"max_version": (1, 0)} if versioned else {}]

    def test_a_plan_keeps_them(self) -> None:
        arrays = w, v, kept, out = [Producer(ones()) for _ in range(4)]
        plan = st.Plan(w, momentum_buffers=v, stashed=kept, outs=[out])
        plan.predict(lr=1.0, steps=1.0)
        gc.collect()
        assert [p.returned for p in arrays] == [0] * 4
        assert out.array.tolist() == [0.0] * 3
        del plan
        assert [p.returned for p in arrays] == [1] * 4

    def test_gradients_go_when_others_come(self) -> None:
        w, v, first, second = zeros(), zeros(), Producer(ones()), Producer(2 * ones())
        plan = st.Plan(w, momentum_buffers=v, grads=first)
        plan.sgd_step_(lr=1.0, momentum=0.5)
        plan.refresh(second)
        assert (first.returned, second.returned) == (1, 0)
        plan.sgd_step_(lr=1.0, momentum=0.5)
        assert v.tolist() == [2.5] * 3
        plan.refresh()  # reads the address of the same array again
        assert (len(second.lent), second.returned) == (2, 1)
        bad = Producer(zeros(4))
        with pytest.raises(ValueError, match="grads"):
            plan.refresh(bad)
        assert (bad.returned, second.returned) == (1, 1)
        del plan
        assert second.returned == 2

    def test_given_back_after_an_error(self) -> None:
        w, v, late = Producer(zeros()), Producer(zeros(4)), Producer(zeros(), major=2)
        with pytest.raises(ValueError, match=r"momentum_buffers: expected shape"):
            st.predict_(w, v, lr=1.0, steps=1.0)
        with pytest.raises(TypeError, match="params: expected DLPack version 1, got 2"):
            st.stash(late, zeros())
        assert w.returned == v.returned == late.returned == 1

    def test_without_strides_or_deleter_and_with_an_offset_in_bytes(self) -> None:
        w = np.arange(6, dtype=np.float32).reshape(2, 3)
        out = np.zeros_like(w)
        st.stash(Producer(w, strides=False, deleter=False), out)
        assert (out == w).all()
        with pytest.raises(ValueError, match=r"out: expected strides \(3, 1\)"):
            st.stash(Producer(w, strides=False), np.zeros((3, 2), np.float32).T)
        st.stash(Producer(w[1], byte_offset=12), out[0])
        assert (out[0] == w[1]).all()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("device", ["cpu", ON_CUDA])
    def test_a_tensor_of_an_owner_that_hides_its_type(self, dtype: str, device: str) -> None:
        w, v = (torch.full((3, 400), x, dtype=getattr(torch, dtype), device=device) for x in (0, 1))
        st.predict_(Hidden(w), Hidden(v), lr=1.0, steps=2.0)
        st.predict_([w], [Hidden(v)], lr=1.0, steps=2.0)
        assert bool((w == -4).all())


class NoCapsule:
    def __dlpack__(self, **_: Any) -> int:
        return 3


_ELEMENTS = r"^params\[1\]: expected float16.*"
_DENSE = r"^params\[1\]: expected a dense tensor.*, got numpy.ndarray: DLPack only supports"
_ALIGNED = r"^params\[1\]: expected memory aligned .* 4 bytes"
_UNEVEN = np.zeros(3, dtype=[("w", "<f8"), ("other", "<f4")])["w"]  # strides of 1.5 elements


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (np.ones(3, np.int64), TypeError, f"{_ELEMENTS}int64$"),
        (np.ones(3, ">f4"), TypeError, _DENSE),
        (np.ones(3, np.longdouble), TypeError, _DENSE),
        (_UNEVEN, TypeError, _DENSE),
        (memoryview(b"weights!"), TypeError, r"^params\[1\]: expected a tensor or an array with"),
        ("weights", TypeError, r"^params\[1\]: expected a tensor or an array with"),
        (NoCapsule(), TypeError, r"^params\[1\]: expected a DLPack capsule.*3"),
        (zeros(8)[::2], ValueError, r"^params\[1\]: expected a dense layout"),
        (zeros(8)[::-1], ValueError, r"^params\[1\]: expected a dense layout"),
        (np.zeros(17, np.uint8)[1:].view(np.float32), ValueError, _ALIGNED),
        *(
            (Refuses(error), TypeError, r"^params\[1\]: .*Refuses: no$")
            for error in (BufferError("no\nand why"), TypeError("no"), RuntimeError("no"))
        ),
    ],
)
def test_what_is_no_array_of_numbers(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        st.stash([ones(), given], [ones(), ones()])


@pytest.mark.parametrize(("handle", "passed"), [(0, 1), (2**40, 2**40)])
def test_cupy_is_asked_for_its_own_stream(
    monkeypatch: pytest.MonkeyPatch, handle: int, passed: int
) -> None:
    """On its own stream, CuPy need not wait."""
    asked: list[int] = []

    def get_current_stream(device: int) -> Any:
        asked.append(device)
        return types.SimpleNamespace(ptr=handle)

    module: Any = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(get_current_stream=get_current_stream)
    monkeypatch.setitem(sys.modules, "cupy", module)
    ndarray = type("ndarray", (Producer,), {"__module__": "cupy"})
    derived = type("derived", (ndarray,), {})
    w, v = ndarray(zeros(), device=CUDA), derived(ones(), device=CUDA)
    plan = st.Plan(w, momentum_buffers=v)
    assert [x.asked for x in (w, v)] == [[{"stream": passed, "max_version": (1, 0)}]] * 2
    assert set(asked) == {0}
    del plan
    assert w.returned == v.returned == 1


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a CUDA build of torch has no stream of a device that is not there",
)
def test_an_owner_without_streams_gets_torchs() -> None:
    w = Producer(zeros(), device=CUDA, versioned=False)
    st.Plan(w)
    assert w.asked == [{"stream": 1}]
    with pytest.raises(ValueError, match=r"momentum_buffers: .*cuda:0.*got cpu"):
        st.predict_(w, zeros(), lr=1.0, steps=1.0)
