"""Tests invalid input to operators and Plans: errors name argument and index; nothing changes.

Numbers are in test_bad_numbers.py; the pipeline has its own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from helpers.bad_input import (
    BAD,
    BY_NAME,
    COUNT,
    EVERY,
    OPS,
    OTHERS,
    SHAPE,
    Lists,
    Op,
    ids,
    pattern,
    raises,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import spectrain_ext as st


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_good_arguments_are_good(op: Op) -> None:
    """Otherwise the tests below would prove nothing."""
    op(op.build())


class TestListsThatDiffer:
    """Lists that differ from the first one, which all others must match."""

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=ids(OTHERS))
    @pytest.mark.parametrize("count", [COUNT + 1, 0])
    def test_length(self, op: Op, name: str, count: int) -> None:
        lists = op.build()
        lists[name] = [torch.randn(SHAPE) for _ in range(count)]
        raises(
            ValueError, pattern(op, name, None), lambda: op(lists), lists, str(COUNT), str(count)
        )

    _SHAPES: ClassVar = [(op, name, (3, 4)) for op, name in OTHERS]
    _SHAPES += [
        (BY_NAME["Plan"], name, shape)
        for name in BY_NAME["Plan"].lists[1:]
        for shape in ((4, 4), (12,), (4, 3, 1), (0,))
    ]

    @pytest.mark.parametrize(("op", "name", "shape"), _SHAPES, ids=ids(_SHAPES))
    def test_shape(self, op: Op, name: str, shape: tuple[int, ...]) -> None:
        lists = op.build()
        lists[name][BAD] = torch.randn(shape)
        raises(
            ValueError,
            pattern(op, name),
            lambda: op(lists),
            lists,
            ", ".join(map(str, SHAPE)),
            ", ".join(map(str, shape)),
        )

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=ids(OTHERS))
    def test_strides(self, op: Op, name: str) -> None:
        lists = op.build()
        lists[name][BAD] = torch.randn(SHAPE[::-1]).t()
        raises(ValueError, pattern(op, name), lambda: op(lists), lists, "3, 1", "1, 4")

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=ids(OTHERS))
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype(self, op: Op, name: str, dtype: torch.dtype) -> None:
        narrow = name.startswith(("grads", "predict")) or (name == "out" and op.name != "stash")
        if dtype.itemsize == 2 and narrow:
            return  # float32 (master) weights: gradients and outputs may have 16 bits
        lists = op.build()
        lists[name][BAD] = torch.randn(SHAPE).to(dtype)
        raises(
            ValueError,
            pattern(op, name),
            lambda: op(lists),
            lists,
            "float32",
            str(dtype).removeprefix("torch."),
        )

    @pytest.mark.parametrize(
        "dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float64)]
    )
    def test_momentum_of_16_bit_weights(self, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        """Their own type or float32 only."""
        w = [torch.randn(SHAPE).to(dtypes[0]) for _ in range(COUNT)]
        v = [torch.randn(SHAPE) for _ in range(COUNT)]
        v[BAD] = v[BAD].to(dtypes[1])
        raises(
            ValueError,
            r"momentum_buffers\[3\]",
            lambda: st.predict_(w, v, lr=0.1, steps=1.0),
            (w, v),
        )

    @pytest.mark.parametrize("name", ["grads", "predict0"])
    def test_gradients_and_predictions_have_the_type_of_the_weights(self, name: str) -> None:
        """A float32 momentum of 16-bit weights does not allow float32 elsewhere."""
        op = BY_NAME["sgd_step_"]
        lists = {n: [t.bfloat16() for t in ts] for n, ts in op.build().items()}
        lists[name][BAD] = lists[name][BAD].float()
        raises(ValueError, pattern(op, name), lambda: op(lists), lists)

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=ids(OTHERS))
    def test_one_tensor_beside_lists(self, op: Op, name: str) -> None:
        lists = op.build()
        lists[name] = torch.randn(SHAPE)
        raises(TypeError, pattern(op, name, None), lambda: op(lists), lists)

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=ids(OTHERS))
    def test_single_tensors_that_differ(self, op: Op, name: str) -> None:
        single = {n: ts[0] for n, ts in op.build().items()}
        single[name] = torch.randn(7, 2)
        raises(ValueError, pattern(op, name, None), lambda: op(single), single, "4, 3", "7, 2")


def _kinds() -> dict[str, Callable[[], object]]:
    def fake() -> Tensor:
        with FakeTensorMode():
            return torch.empty(SHAPE)

    return {
        "int64": lambda: torch.ones(SHAPE, dtype=torch.int64),
        "int8": lambda: torch.ones(SHAPE, dtype=torch.int8),
        "bool": lambda: torch.ones(SHAPE, dtype=torch.bool),
        "complex64": lambda: torch.randn(SHAPE, dtype=torch.complex64),
        "conj": lambda: torch.randn(SHAPE, dtype=torch.complex64).conj(),
        "float8": lambda: torch.ones(SHAPE).to(torch.float8_e4m3fn),
        "sparse": lambda: torch.eye(*SHAPE).to_sparse(),
        "sparse_csr": lambda: torch.eye(*SHAPE).to_sparse_csr(),
        "mkldnn": lambda: torch.randn(SHAPE).to_mkldnn(),
        "meta": lambda: torch.empty(SHAPE, device="meta"),
        "fake": fake,
        "neg": lambda: torch._neg_view(torch.randn(SHAPE)),
        "list": lambda: [[1.0] * 3] * 4,
        "number": lambda: 1.0,
        "string": lambda: "weights",
        "None": lambda: None,
    }


KINDS = _kinds()
#: The description of wrong input in a message.
SAYS = {
    "int64": "int64",
    "complex64": "complex64",
    "sparse": "sparse",
    "meta": "meta",
    "fake": "ake",
    "neg": "neg",
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
class TestKinds:
    """Tensors that no operator supports, at any place."""

    # Every kind for a call and for a plan, which take different paths; two of them for all others.
    _KINDS: ClassVar = [
        (op, name, kind)
        for op, name in EVERY
        for kind in KINDS
        if op.name in ("stash_predict_", "Plan") or kind in ("int64", "number")
    ]

    @pytest.mark.parametrize(("op", "name", "kind"), _KINDS, ids=ids(_KINDS))
    def test_in_a_list(self, op: Op, name: str, kind: str) -> None:
        if kind == "None" and name == "grads":
            pytest.skip("a missing gradient is allowed")
        if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
            pytest.skip("this torch has no mkldnn")
        lists = op.build()
        lists[name][BAD] = KINDS[kind]()
        says = [SAYS[kind]] if kind in SAYS else []
        error = (
            ValueError if kind == "neg" else TypeError
        )  # right kind of tensor, wrong values in memory
        raises(error, pattern(op, name), lambda: op(lists), lists, *says)

    @pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
    @pytest.mark.parametrize("kind", ["int64", "meta", "fake", "sparse", "number"])
    def test_alone(self, op: Op, kind: str) -> None:
        single: Lists = {n: KINDS[kind]() for n in op.lists}
        raises(TypeError, pattern(op, op.lists[0], None), lambda: op(single), single)

    @pytest.mark.parametrize(("op", "name"), EVERY, ids=ids(EVERY))
    @pytest.mark.parametrize("value", [3, object()], ids=["int", "object"])
    def test_an_argument_that_is_no_list(self, op: Op, name: str, value: object) -> None:
        lists = op.build()
        lists[name] = value
        raises(TypeError, pattern(op, name, None), lambda: op(lists), lists)

    def test_real_part_of_a_conjugate(self) -> None:
        """.imag of a conj view is a real tensor with the neg bit: memory has the opposite sign."""
        w = torch.randn(6, dtype=torch.complex64).conj().imag
        assert w.is_neg()
        raises(ValueError, "params", lambda: st.restore_(w, torch.zeros(6)), w)


class TestOverlap:
    """Memory that a call would write twice, or read after writing it."""

    @pytest.mark.parametrize(("op", "name"), EVERY, ids=ids(EVERY))
    def test_inside_a_tensor(self, op: Op, name: str) -> None:
        """An expanded tensor has the same memory several times."""
        lists = op.build()
        lists[name][BAD] = torch.randn(1, 3).expand(SHAPE)
        raises(ValueError, pattern(op, name), lambda: op(lists), lists)

    @pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
    def test_inside_every_tensor_alike(self, op: Op) -> None:
        """Equal strides everywhere do not make them valid."""
        lists = {n: [torch.randn(1, 3).expand(SHAPE)] for n in op.lists}
        raises(ValueError, pattern(op, op.lists[0], 0), lambda: op(lists), lists)

    @pytest.mark.parametrize("strides", [(2, 1), (1, 1), (3, 2)])
    def test_windows_that_overlap_or_leave_holes(self, strides: tuple[int, int]) -> None:
        w = torch.randn(40).as_strided(SHAPE, strides)
        kept = torch.randn(40).as_strided(SHAPE, strides)
        raises(ValueError, "params", lambda: st.restore_(w, kept), (w, kept))

    _WRITTEN: ClassVar = [(op, name) for op in OPS for name in op.written]

    @pytest.mark.parametrize(("op", "name"), _WRITTEN, ids=ids(_WRITTEN))
    def test_one_tensor_twice_in_a_list_that_is_written(self, op: Op, name: str) -> None:
        lists = op.build()
        lists[name][BAD] = lists[name][1]
        names = f"{pattern(op, name, BAD)}|{pattern(op, name, 1)}"
        raises(ValueError, names, lambda: op(lists), lists)

    @pytest.mark.parametrize(("op", "name"), _WRITTEN, ids=ids(_WRITTEN))
    @pytest.mark.parametrize("shift", [1, 11])
    def test_views_that_overlap_in_a_list_that_is_written(
        self, op: Op, name: str, shift: int
    ) -> None:
        lists = op.build()
        flat = torch.randn(12 + shift)
        lists[name][1] = flat[:12].view(SHAPE)
        lists[name][BAD] = flat[shift:].view(SHAPE)
        names = f"{pattern(op, name, BAD)}|{pattern(op, name, 1)}"
        raises(ValueError, names, lambda: op(lists), lists)

    _PAIRS: ClassVar = [(op, a, b) for op in OPS for a in op.written for b in op.lists if a != b]

    @pytest.mark.parametrize(("op", "written", "other"), _PAIRS, ids=ids(_PAIRS))
    def test_a_written_view_over_part_of_another_list(
        self, op: Op, written: str, other: str
    ) -> None:
        lists = op.build()
        flat = torch.randn(12 + 6)
        lists[written][BAD] = flat[:12].view(SHAPE)
        lists[other][BAD] = flat[6:].view(SHAPE)
        names = f"{pattern(op, written)}|{pattern(op, other)}"
        raises(ValueError, names, lambda: op(lists), lists)

    @pytest.mark.parametrize(("op", "written", "other"), _PAIRS, ids=ids(_PAIRS))
    def test_a_written_tensor_elsewhere_in_another_list(
        self, op: Op, written: str, other: str
    ) -> None:
        """The whole tensor at another index: another row may already have overwritten it."""
        lists = op.build()
        lists[other][1] = lists[written][BAD]
        names = f"{pattern(op, written)}|{pattern(op, other, 1)}"
        raises(ValueError, names, lambda: op(lists), lists)

    @pytest.mark.parametrize("pair", [("params", "grads"), ("params", "momentum_buffers")])
    def test_the_step_does_not_take_one_tensor_for_two_things(self, pair: tuple[str, str]) -> None:
        op = BY_NAME["sgd_step_"]
        lists = op.build()
        lists[pair[1]][BAD] = lists[pair[0]][BAD]
        names = f"{pattern(op, pair[0])}|{pattern(op, pair[1])}"
        raises(ValueError, names, lambda: op(lists), lists)

    def test_two_predictions_into_one_tensor(self) -> None:
        op = BY_NAME["sgd_step_"]
        lists = op.build()
        lists["predict1"][BAD] = lists["predict0"][BAD]
        names = f"{pattern(op, 'predict0')}|{pattern(op, 'predict1')}"
        raises(ValueError, names, lambda: op(lists), lists)

    def test_swapping_a_tensor_with_itself(self) -> None:
        a = torch.randn(SHAPE)
        raises(ValueError, r"\ba\b|\bb\b", lambda: st.swap_(a, a), a)

    def test_neighbours_do_not_overlap(self) -> None:
        flat = torch.randn(24)
        a, b = flat[:12], flat[12:]
        st.swap_(a, b)
        st.predict_([a, b], [torch.zeros(12), torch.zeros(12)], lr=0.1, steps=1.0)

    def test_inputs_may_share_memory(self) -> None:
        v = torch.ones(SHAPE)
        w = [torch.zeros(SHAPE), torch.zeros(SHAPE)]
        st.predict_(w, [v, v], lr=1.0, steps=1.0)
        assert all(bool((t == -1).all()) for t in w)

    def test_a_prediction_out_of_place_into_its_weights(self) -> None:
        """This is predict_'s job; predict must not change the weights."""
        w, v = torch.zeros(SHAPE), torch.ones(SHAPE)
        raises(ValueError, "out|params", lambda: st.predict(w, v, lr=1.0, steps=1.0, out=w), (w, v))

    def test_empty_tensors_overlap_nothing(self) -> None:
        empty = torch.empty(0)
        st.swap_([empty, empty], [empty, empty])


class TestForgedObjects:
    """Classes and objects that claim to be others: each of these ended the interpreter."""

    class Property(Tensor):
        @property
        def _cdata(self) -> int:
            return 0x1234560

    class Function(Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(function, "__self__", None) is torch.Tensor._cdata:  # type: ignore[attr-defined]
                return 0x1234560
            return super().__torch_function__(function, types, args, kwargs or {})

    @pytest.mark.parametrize("kind", [Property, Function])
    def test_an_address_that_a_tensor_claims(self, kind: type[Tensor]) -> None:
        weight = torch.ones(4).as_subclass(kind)
        assert weight._cdata == 0x1234560
        plan = st.Plan([weight], momentum_buffers=[torch.ones(4)])
        for _ in range(2):
            plan.predict_(lr=0.5, steps=1.0)
        assert torch.equal(weight.as_subclass(Tensor), torch.zeros(4))
        weight.data = torch.ones(5)
        with pytest.raises(RuntimeError, match=r"params\[0\]: its memory is not where"):
            plan.predict_(lr=0.5, steps=1.0)
