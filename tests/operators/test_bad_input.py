"""Tests invalid lists of operators and Plans: errors name argument and index; nothing changes.

Numbers and options are in test_bad_numbers.py, all combinations of dtypes in test_dtypes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.bad_input import raises
from helpers.operator_table import COUNT, OPS, PLANS, SHAPE, Op, alone
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import spectrain_ext as st

EVERYWHERE = [(op, name) for op in (*OPS, *PLANS) for name in op.lists]
#: Lists that are compared with the first one.
OTHERS = [(op, name) for op, name in EVERYWHERE if name != op.lists[0]]
WRITTEN = [(op, name) for op, name in EVERYWHERE if name in op.written]
#: A call and a plan take different paths.
DEEPLY = [(op, name) for op, name in EVERYWHERE if op.name in ("stash_predict_", "Plan")]


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(SHAPE)


class Fault(NamedTuple):
    """What is given instead of a good list or of its tensor 3, and where and how that is said."""

    places: list[tuple[Op, str]]
    error: type[Exception]
    spoiled: Callable[[list[Tensor]], object]
    index: str = "3"
    says: tuple[object, ...] = ()


def _one(bad: Callable[[], object]) -> Callable[[list[Tensor]], list[object]]:
    return lambda good: [*good[:3], bad(), *good[4:]]


def _windows(shift: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """Make tensors 1 and 3 views of the same memory, so many elements apart."""

    def spoiled(good: list[Tensor]) -> list[Tensor]:
        flat = torch.rand(12 + shift)
        return [good[0], flat[:12].view(SHAPE), good[2], flat[shift:].view(SHAPE), good[4]]

    return spoiled


def _kind(bad: Callable[[], object], *says: str, places: list[tuple[Op, str]] = DEEPLY) -> Fault:
    return Fault(places, TypeError, _one(bad), says=says)


FAULTS = {
    "one more": Fault(
        OTHERS, ValueError, lambda good: [*good, good[0] + 1], "", (COUNT, COUNT + 1)
    ),
    "none": Fault(OTHERS, ValueError, lambda _: [], "", (COUNT, 0)),
    "one tensor": Fault(OTHERS, TypeError, lambda good: good[0], ""),
    "an int": Fault(EVERYWHERE, TypeError, lambda _: 3, ""),
    "shape": Fault(OTHERS, ValueError, _one(lambda: torch.rand(3, 4)), says=("4, 3", "3, 4")),
    "more dimensions": Fault(DEEPLY, ValueError, _one(lambda: torch.rand(4, 3, 1))),
    "strides": Fault(OTHERS, ValueError, _one(lambda: torch.rand(3, 4).t()), says=("3, 1", "1, 4")),
    "float64": Fault(
        OTHERS, ValueError, _one(lambda: torch.rand(SHAPE).double()), says=("float32", "float64")
    ),
    "the same memory within": Fault(
        EVERYWHERE, ValueError, _one(lambda: torch.rand(1, 3).expand(SHAPE))
    ),
    "a tensor twice": Fault(WRITTEN, ValueError, _windows(0), "[13]"),
    "an overlap of one element": Fault(WRITTEN, ValueError, _windows(11), "[13]"),
    "int64": _kind(lambda: torch.ones(SHAPE, dtype=torch.int64), "int64", places=EVERYWHERE),
    "complex64": _kind(lambda: torch.randn(SHAPE, dtype=torch.complex64), "complex64"),
    "float8": _kind(lambda: torch.ones(SHAPE).to(torch.float8_e4m3fn)),
    "sparse": _kind(lambda: torch.eye(*SHAPE).to_sparse(), "sparse"),
    "meta": _kind(lambda: torch.empty(SHAPE, device="meta"), "meta"),
    "fake": _kind(_fake, "ake"),
    "a string": _kind(lambda: "weights"),
    "None": _kind(lambda: None, places=[place for place in DEEPLY if place[1] != "grads"]),
    # the right kind of tensor, with other values in memory
    "negative view": Fault(
        DEEPLY, ValueError, _one(lambda: torch._neg_view(torch.rand(SHAPE))), says=("neg",)
    ),
}
if torch.backends.mkldnn.is_available():
    FAULTS["mkldnn"] = _kind(lambda: torch.rand(SHAPE).to_mkldnn())


def _named(name: str, index: str = "") -> str:
    """Match an argument and an index in a message: "momentum_buffers[3]", "outs[1][3]"."""
    at = rf"\[{index}\]" if index else ""
    if name.startswith("predict"):
        number = name[-1]
        return rf"(outs\[{number}\]|predict\[{number}\](\[1\]|\.out)?){at}"
    return rf"\b{name}{at}"


@pytest.mark.parametrize(
    ("op", "name", "fault"),
    [
        pytest.param(op, name, fault, id=f"{op.name}-{name}-{what}")
        for what, fault in FAULTS.items()
        for op, name in fault.places
    ],
)
def test_a_bad_list(op: Op, name: str, fault: Fault) -> None:
    lists = op.build()
    op({key: [t.clone() for t in good] for key, good in lists.items()})  # it proves something
    lists[name] = fault.spoiled(lists[name])
    names, says = _named(name, fault.index), map(str, fault.says)
    raises(fault.error, names, lambda: op(lists), lists, *says)


@pytest.mark.parametrize(
    ("op", "name"), [pytest.param(*place, id=f"{place[0].name}-{place[1]}") for place in OTHERS]
)
def test_single_tensors_that_differ(op: Op, name: str) -> None:
    single = {**alone(op.build()), name: torch.rand(7, 2)}
    raises(ValueError, _named(name), lambda: op(single), single, "4, 3", "7, 2")
    a_list = {**single, name: [torch.rand(SHAPE)]}
    raises(TypeError, _named(name), lambda: op(a_list), a_list)


PAIRS = [(op, a, b) for op in (*OPS, *PLANS) for a in op.written for b in op.lists if a != b]


@pytest.mark.parametrize("shared", ["part", "whole", "elsewhere"])
@pytest.mark.parametrize(("op", "written", "other"), PAIRS, ids=str)
def test_memory_of_a_written_list_in_another(op: Op, written: str, other: str, shared: str) -> None:
    lists, index = op.build(), 3
    if shared == "part":
        flat = torch.rand(12 + 6)
        lists[written][3] = flat[:12].view(SHAPE)
        lists[other][3] = flat[6:].view(SHAPE)
    elif shared == "whole":
        lists[other][3] = lists[written][3]
    else:  # where another row may already have overwritten it
        lists[other][1], index = lists[written][3], 1
    names = f"{_named(written, '3')}|{_named(other, str(index))}"
    raises(ValueError, names, lambda: op(lists), lists)


@pytest.mark.parametrize("strides", [(2, 1), (1, 1), (3, 2)])
def test_windows_that_overlap_or_leave_holes(strides: tuple[int, int]) -> None:
    w, kept = (torch.rand(40).as_strided(SHAPE, strides) for _ in range(2))
    raises(ValueError, "params", lambda: st.restore_(w, kept), (w, kept))


def test_what_may_share_memory() -> None:
    flat, empty, v = torch.zeros(24), torch.empty(0), torch.ones(12)
    st.swap_([empty, empty], [empty, empty])
    st.predict_([flat[:12], flat[12:]], [v, v], lr=1.0, steps=1.0)  # neighbours; inputs
    assert bool((flat == -1).all())


_W = [torch.randn(4), torch.randn(4)]


@pytest.mark.parametrize(
    ("others", "error", "says"),
    [
        ([_W, [_W[0], torch.randn(5)]], ValueError, r"others\[1\]\[1\]: expected shape"),
        ([[_W[0], _W[1].bfloat16()]], ValueError, r"others\[0\]\[1\]: expected float32, the"),
        ([_W[:1]], ValueError, r"others\[0\]: expected as many tensors as params, 2"),
        ([_W[0]], TypeError, r"others\[0\]"),
        (_W[0], TypeError, "others: expected a sequence of lists"),
        (3, TypeError, "others: expected a sequence of lists"),
    ],
    ids=["shape", "dtype", "length", "no list", "tensor", "number"],
)
def test_bad_lists_of_a_distance(others: Any, error: type[Exception], says: str) -> None:
    raises(error, says, lambda: st.distance(_W, others), (_W, others))


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
def test_an_address_that_a_tensor_claims(kind: type[Tensor]) -> None:
    """Each of these ended the interpreter."""
    weight = torch.ones(4).as_subclass(kind)
    assert weight._cdata == 0x1234560
    plan = st.Plan([weight], momentum_buffers=[torch.ones(4)])
    for _ in range(2):
        plan.predict_(lr=0.5, steps=1.0)
    assert torch.equal(weight.as_subclass(Tensor), torch.zeros(4))
    weight.data = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"params\[0\]: its memory is not where"):
        plan.predict_(lr=0.5, steps=1.0)
