"""Bad input to operators and Plans: an error that names argument and index, nothing changed.

What concerns pipelines is in the pipeline's own tests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import spectrain_ext as st

SHAPE = (4, 3)
COUNT = 5  # tensors per list
BAD = 3  # the index of the bad one
NAN = math.nan


def _walk(x: object) -> Iterator[Tensor]:
    """Every tensor in nested arguments whose memory can be looked at."""
    if isinstance(x, Tensor):
        if x.layout == torch.strided and x.device.type == "cpu" and not isinstance(x, FakeTensor):
            yield x
    elif isinstance(x, Mapping):
        for y in x.values():
            yield from _walk(y)
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _walk(y)


class Unchanged:
    """Remembers the bytes of whole storages and the version counters, and compares them."""

    def __init__(self, *arguments: object) -> None:
        self._tensors = list(_walk(arguments))
        self._bytes = [bytes(t.untyped_storage()) for t in self._tensors]
        self._versions = [t._version for t in self._tensors]

    def check(self) -> None:
        for t, was, version in zip(self._tensors, self._bytes, self._versions, strict=True):
            assert bytes(t.untyped_storage()) == was, "a tensor changed"
            assert t._version == version, "a version counter was bumped although nothing was done"


Lists = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """An operator: its list arguments, which of them it writes, and how it is called."""

    name: str
    lists: tuple[str, ...]
    written: tuple[str, ...]
    call: Callable[..., object]
    scalars: tuple[tuple[str, Any], ...] = ()

    def build(self) -> Lists:
        """A good argument for every list."""
        return {name: [torch.randn(SHAPE) for _ in range(COUNT)] for name in self.lists}

    def __call__(self, lists: Lists, **changes: object) -> object:
        return self.call(**lists, **{**dict(self.scalars), **changes})


def _sgd(**a: Any) -> object:
    first, second = a.pop("predict0"), a.pop("predict1")
    steps = a.pop("steps", 2.0)
    return st.sgd_step_(
        a.pop("params"),
        a.pop("grads"),
        a.pop("momentum_buffers"),
        predict=a.pop("predict", [(1.0, first), (steps, second)]),
        **a,
    )


def _plan(**a: Any) -> object:
    first, second = a.pop("predict0"), a.pop("predict1")
    return st.Plan(a.pop("params"), outs=[first, second], **a)


_LR_STEPS = (("lr", 0.1), ("steps", 2.0))
OPS = [
    Op("predict_", ("params", "momentum_buffers"), ("params",), st.predict_, _LR_STEPS),
    Op("predict", ("params", "momentum_buffers", "out"), ("out",), st.predict, _LR_STEPS),
    Op("stash", ("params", "out"), ("out",), st.stash),
    Op("restore_", ("params", "stashed"), ("params",), st.restore_),
    Op("swap_", ("a", "b"), ("a", "b"), st.swap_),
    Op(
        "stash_predict_",
        ("params", "stashed", "momentum_buffers"),
        ("params", "stashed"),
        st.stash_predict_,
        _LR_STEPS,
    ),
    Op(
        "sgd_step_",
        ("params", "grads", "momentum_buffers", "predict0", "predict1"),
        ("params", "momentum_buffers", "predict0", "predict1"),
        _sgd,
        (("lr", 0.1), ("momentum", 0.9)),
    ),
    Op(
        "Plan",
        ("params", "momentum_buffers", "grads", "stashed", "predict0", "predict1"),
        ("params", "momentum_buffers", "stashed", "predict0", "predict1"),
        _plan,
    ),
]
EVERY = [(op, name) for op in OPS for name in op.lists]
#: Where one list can differ from the first; gradients and the rest are measured against params.
OTHERS = [(op, name) for op in OPS for name in op.lists[1:]]


def _ids(values: list[tuple[Any, ...]]) -> list[str]:
    return ["-".join(v.name if isinstance(v, Op) else str(v) for v in row) for row in values]


def _pattern(op: Op, name: str, index: int | None = BAD) -> str:
    """The argument and the index as a message names them: "momentum_buffers[3]", "outs[1][3]"."""
    at = "" if index is None else rf"\[{index}\]"
    if name.startswith("predict") and name[-1].isdigit():
        number = name[-1]
        return rf"(outs\[{number}\]|predict\[{number}\](\[1\]|\.out)?){at}"
    return rf"\b{name}{at}"


def _raises(
    error: type[Exception] | tuple[type[Exception], ...],
    names: str,
    call: Callable[[], object],
    watched: object,
    *says: str,
) -> None:
    """It raises that error, the message matches ``names``, contains ``says``, nothing changed."""
    before = Unchanged(watched)
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "frame #" not in message, (
        f"a C++ stack trace is no message for a person: {message[:200]!r}"
    )
    assert re.search(names, message), f"{message!r} does not name {names}"
    for word in says:
        assert word in message, f"{message!r} does not say {word!r}"
    before.check()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_good_arguments_are_good(op: Op) -> None:
    """Otherwise the tests below would prove nothing."""
    op(op.build())


class TestListsThatDiffer:
    """Against the first list, whose tensors everything else must match."""

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=_ids(OTHERS))
    @pytest.mark.parametrize("count", [COUNT - 1, COUNT + 1, 0])
    def test_length(self, op: Op, name: str, count: int) -> None:
        lists = op.build()
        lists[name] = [torch.randn(SHAPE) for _ in range(count)]
        _raises(
            ValueError, _pattern(op, name, None), lambda: op(lists), lists, str(COUNT), str(count)
        )

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=_ids(OTHERS))
    @pytest.mark.parametrize("shape", [(3, 4), (4, 4), (12,), (4, 3, 1), (0,)])
    def test_shape(self, op: Op, name: str, shape: tuple[int, ...]) -> None:
        lists = op.build()
        lists[name][BAD] = torch.randn(shape)
        _raises(
            ValueError,
            _pattern(op, name),
            lambda: op(lists),
            lists,
            ", ".join(map(str, SHAPE)),
            ", ".join(map(str, shape)),
        )

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=_ids(OTHERS))
    def test_strides(self, op: Op, name: str) -> None:
        lists = op.build()
        lists[name][BAD] = torch.randn(SHAPE[::-1]).t()
        _raises(ValueError, _pattern(op, name), lambda: op(lists), lists, "3, 1", "1, 4")

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=_ids(OTHERS))
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_dtype(self, op: Op, name: str, dtype: torch.dtype) -> None:
        lists = op.build()
        lists[name][BAD] = torch.randn(SHAPE).to(dtype)
        _raises(
            ValueError,
            _pattern(op, name),
            lambda: op(lists),
            lists,
            "float32",
            str(dtype).removeprefix("torch."),
        )

    @pytest.mark.parametrize(
        "dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float64)]
    )
    def test_momentum_of_16_bit_weights(self, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        """Their own type or float32, nothing else."""
        w = [torch.randn(SHAPE).to(dtypes[0]) for _ in range(COUNT)]
        v = [torch.randn(SHAPE) for _ in range(COUNT)]
        v[BAD] = v[BAD].to(dtypes[1])
        _raises(
            ValueError,
            r"momentum_buffers\[3\]",
            lambda: st.predict_(w, v, lr=0.1, steps=1.0),
            (w, v),
        )

    @pytest.mark.parametrize("name", ["grads", "predict0"])
    def test_gradients_and_predictions_have_the_type_of_the_weights(self, name: str) -> None:
        """float32 momentum beside 16-bit weights does not make float32 right elsewhere."""
        op = OPS[6]
        lists = {n: [t.bfloat16() for t in ts] for n, ts in op.build().items()}
        lists[name][BAD] = lists[name][BAD].float()
        _raises(ValueError, _pattern(op, name), lambda: op(lists), lists)

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=_ids(OTHERS))
    def test_one_tensor_beside_lists(self, op: Op, name: str) -> None:
        lists = op.build()
        lists[name] = torch.randn(SHAPE)
        _raises(TypeError, _pattern(op, name, None), lambda: op(lists), lists)

    @pytest.mark.parametrize(("op", "name"), OTHERS, ids=_ids(OTHERS))
    def test_single_tensors_that_differ(self, op: Op, name: str) -> None:
        single = {n: ts[0] for n, ts in op.build().items()}
        single[name] = torch.randn(7, 2)
        _raises(ValueError, _pattern(op, name, None), lambda: op(single), single, "4, 3", "7, 2")


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
#: What a message must say came, where the plain word exists.
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
    """Tensors that no operator can take, wherever they are."""

    @pytest.mark.parametrize(("op", "name"), EVERY, ids=_ids(EVERY))
    @pytest.mark.parametrize("kind", KINDS)
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
        _raises(error, _pattern(op, name), lambda: op(lists), lists, *says)

    @pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
    @pytest.mark.parametrize("kind", ["int64", "meta", "fake", "sparse", "number"])
    def test_alone(self, op: Op, kind: str) -> None:
        single: Lists = {n: KINDS[kind]() for n in op.lists}
        _raises(TypeError, _pattern(op, op.lists[0], None), lambda: op(single), single)

    @pytest.mark.parametrize(("op", "name"), EVERY, ids=_ids(EVERY))
    @pytest.mark.parametrize("value", [3, 1.5, object()], ids=["int", "float", "object"])
    def test_an_argument_that_is_no_list(self, op: Op, name: str, value: object) -> None:
        lists = op.build()
        lists[name] = value
        _raises(TypeError, _pattern(op, name, None), lambda: op(lists), lists)

    def test_real_part_of_a_conjugate(self) -> None:
        """.imag of a conj view is a real tensor with the neg bit: its memory has the wrong sign."""
        w = torch.randn(6, dtype=torch.complex64).conj().imag
        assert w.is_neg()
        _raises(ValueError, "params", lambda: st.restore_(w, torch.zeros(6)), w)


class TestOverlap:
    """Memory that a call would write twice, or read after it wrote."""

    @pytest.mark.parametrize(("op", "name"), EVERY, ids=_ids(EVERY))
    def test_inside_a_tensor(self, op: Op, name: str) -> None:
        """An expanded tensor names the same memory again and again."""
        lists = op.build()
        lists[name][BAD] = torch.randn(1, 3).expand(SHAPE)
        _raises(ValueError, _pattern(op, name), lambda: op(lists), lists)

    @pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
    def test_inside_every_tensor_alike(self, op: Op) -> None:
        """Equal strides everywhere do not make them right."""
        lists = {n: [torch.randn(1, 3).expand(SHAPE)] for n in op.lists}
        _raises(ValueError, _pattern(op, op.lists[0], 0), lambda: op(lists), lists)

    @pytest.mark.parametrize("strides", [(2, 1), (1, 1), (3, 2)])
    def test_windows_that_overlap_or_leave_holes(self, strides: tuple[int, int]) -> None:
        w = torch.randn(40).as_strided(SHAPE, strides)
        kept = torch.randn(40).as_strided(SHAPE, strides)
        _raises(ValueError, "params", lambda: st.restore_(w, kept), (w, kept))

    _WRITTEN: ClassVar = [(op, name) for op in OPS for name in op.written]

    @pytest.mark.parametrize(("op", "name"), _WRITTEN, ids=_ids(_WRITTEN))
    def test_one_tensor_twice_in_a_list_that_is_written(self, op: Op, name: str) -> None:
        lists = op.build()
        lists[name][BAD] = lists[name][1]
        names = f"{_pattern(op, name, BAD)}|{_pattern(op, name, 1)}"
        _raises(ValueError, names, lambda: op(lists), lists)

    @pytest.mark.parametrize(("op", "name"), _WRITTEN, ids=_ids(_WRITTEN))
    @pytest.mark.parametrize("shift", [1, 3, 11])
    def test_views_that_overlap_in_a_list_that_is_written(
        self, op: Op, name: str, shift: int
    ) -> None:
        lists = op.build()
        flat = torch.randn(12 + shift)
        lists[name][1] = flat[:12].view(SHAPE)
        lists[name][BAD] = flat[shift:].view(SHAPE)
        names = f"{_pattern(op, name, BAD)}|{_pattern(op, name, 1)}"
        _raises(ValueError, names, lambda: op(lists), lists)

    _PAIRS: ClassVar = [(op, a, b) for op in OPS for a in op.written for b in op.lists if a != b]

    @pytest.mark.parametrize(("op", "written", "other"), _PAIRS, ids=_ids(_PAIRS))
    @pytest.mark.parametrize("shift", [1, 6])
    def test_a_written_view_over_part_of_another_list(
        self, op: Op, written: str, other: str, shift: int
    ) -> None:
        lists = op.build()
        flat = torch.randn(12 + shift)
        lists[written][BAD] = flat[:12].view(SHAPE)
        lists[other][BAD] = flat[shift:].view(SHAPE)
        names = f"{_pattern(op, written)}|{_pattern(op, other)}"
        _raises(ValueError, names, lambda: op(lists), lists)

    @pytest.mark.parametrize(("op", "written", "other"), _PAIRS, ids=_ids(_PAIRS))
    def test_a_written_tensor_elsewhere_in_another_list(
        self, op: Op, written: str, other: str
    ) -> None:
        """The whole tensor under another index: another row may have overwritten it already."""
        lists = op.build()
        lists[other][1] = lists[written][BAD]
        names = f"{_pattern(op, written)}|{_pattern(op, other, 1)}"
        _raises(ValueError, names, lambda: op(lists), lists)

    @pytest.mark.parametrize("pair", [("params", "grads"), ("params", "momentum_buffers")])
    def test_the_step_does_not_take_one_tensor_for_two_things(self, pair: tuple[str, str]) -> None:
        op = OPS[6]
        lists = op.build()
        lists[pair[1]][BAD] = lists[pair[0]][BAD]
        names = f"{_pattern(op, pair[0])}|{_pattern(op, pair[1])}"
        _raises(ValueError, names, lambda: op(lists), lists)

    def test_two_predictions_into_one_tensor(self) -> None:
        op = OPS[6]
        lists = op.build()
        lists["predict1"][BAD] = lists["predict0"][BAD]
        names = f"{_pattern(op, 'predict0')}|{_pattern(op, 'predict1')}"
        _raises(ValueError, names, lambda: op(lists), lists)

    def test_swapping_a_tensor_with_itself(self) -> None:
        a = torch.randn(SHAPE)
        _raises(ValueError, r"\ba\b|\bb\b", lambda: st.swap_(a, a), a)

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
        """That is predict_; predict promises to leave the weights alone."""
        w, v = torch.zeros(SHAPE), torch.ones(SHAPE)
        _raises(
            ValueError, "out|params", lambda: st.predict(w, v, lr=1.0, steps=1.0, out=w), (w, v)
        )

    def test_empty_tensors_overlap_nothing(self) -> None:
        empty = torch.empty(0)
        st.swap_([empty, empty], [empty, empty])


class TestNumbers:
    """Scalars that make no sense."""

    _SCALED: ClassVar = [OPS[0], OPS[1], OPS[5]]

    @pytest.mark.parametrize("op", _SCALED, ids=lambda op: op.name)
    @pytest.mark.parametrize("name", ["lr", "steps"])
    @pytest.mark.parametrize("value", [-1.0, -1e-300, NAN, -math.inf])
    def test_negative_or_nan(self, op: Op, name: str, value: float) -> None:
        lists = op.build()
        _raises(ValueError, rf"\b{name}\b", lambda: op(lists, **{name: value}), lists, str(value))

    @pytest.mark.parametrize("op", _SCALED, ids=lambda op: op.name)
    @pytest.mark.parametrize("name", ["lr", "steps"])
    @pytest.mark.parametrize("value", ["0.1", None, [0.1], 1j], ids=repr)
    def test_no_number(self, op: Op, name: str, value: object) -> None:
        lists = op.build()
        _raises(TypeError, rf"^{name}: ", lambda: op(lists, **{name: value}), lists)

    @pytest.mark.parametrize("op", _SCALED, ids=lambda op: op.name)
    @pytest.mark.parametrize("name", ["lr", "steps"])
    def test_missing(self, op: Op, name: str) -> None:
        lists = op.build()
        arguments = {k: v for k, v in op.scalars if k != name}
        _raises(TypeError, name, lambda: op.call(**lists, **arguments), lists)

    @pytest.mark.parametrize("op", _SCALED, ids=lambda op: op.name)
    def test_also_when_there_is_nothing_to_do(self, op: Op) -> None:
        empty: Lists = {n: [] for n in op.lists}
        with pytest.raises(ValueError, match="lr"):
            op(empty, lr=-1.0)

    @pytest.mark.parametrize(
        "changes",
        [
            {"lr": -1.0},
            {"lr": NAN},
            {"momentum": -0.1},
            {"momentum": NAN},
            {"weight_decay": NAN},
            {"weight_decay": -1.0},
            {"dampening": NAN},
        ],
        ids=str,
    )
    def test_of_the_step(self, changes: dict[str, float]) -> None:
        op = OPS[6]
        lists = op.build()
        (name,) = changes
        _raises(ValueError, name, lambda: op(lists, **changes), lists)

    @pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay", "dampening"])
    def test_no_number_in_the_step(self, name: str) -> None:
        op = OPS[6]
        lists = op.build()
        _raises(TypeError, rf"^{name}: ", lambda: op(lists, **{name: "0.1"}), lists)

    @pytest.mark.parametrize("steps", [-1.0, NAN])
    def test_of_a_prediction_in_the_step(self, steps: float) -> None:
        op = OPS[6]
        lists = op.build()
        _raises(ValueError, r"predict\[1\]|steps", lambda: op(lists, steps=steps), lists)


class TestStep:
    """What only sgd_step_ can get wrong."""

    def _lists(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        return tuple([torch.randn(SHAPE) for _ in range(COUNT)] for _ in range(4))  # type: ignore[return-value]

    def test_a_prediction_without_momentum(self) -> None:
        w, g, v, out = self._lists()
        for buffers in (v, None):
            _raises(
                ValueError,
                "momentum",
                lambda buffers=buffers: st.sgd_step_(  # type: ignore[misc]
                    w, g, buffers, lr=0.1, momentum=0.0, predict=[(1.0, out)]
                ),
                (w, g, v, out),
                "predict",
            )

    def test_momentum_without_buffers(self) -> None:
        w, g, v, _ = self._lists()
        _raises(
            ValueError,
            "momentum_buffers",
            lambda: st.sgd_step_(w, g, None, lr=0.1, momentum=0.9),
            (w, g, v),
        )

    @pytest.mark.parametrize("options", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
    def test_nesterov_needs_momentum_and_no_dampening(self, options: dict[str, float]) -> None:
        """As torch.optim.SGD has it."""
        w, g, v, _ = self._lists()
        _raises(
            ValueError,
            "nesterov",
            lambda: st.sgd_step_(w, g, v, lr=0.1, nesterov=True, **options),
            (w, g, v),
        )

    @pytest.mark.parametrize("flags", [[True], [True] * (COUNT + 1), []])
    def test_first_step_of_another_length(self, flags: list[bool]) -> None:
        w, g, v, _ = self._lists()
        _raises(
            ValueError,
            "first_step",
            lambda: st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, first_step=flags),
            (w, g, v),
            str(COUNT),
            str(len(flags)),
        )

    @pytest.mark.parametrize("flags", ["yes", 1.5, ["yes"] * COUNT, None], ids=repr)
    def test_first_step_of_another_kind(self, flags: object) -> None:
        w, g, v, _ = self._lists()
        _raises(
            TypeError,
            "first_step",
            lambda: st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, first_step=flags),  # type: ignore[arg-type]
            (w, g, v),
        )

    @pytest.mark.parametrize("bad", [3, (1.0,), (1.0, None, None), ("x", None)], ids=repr)
    def test_an_entry_of_predict_that_is_no_pair(self, bad: object) -> None:
        w, g, v, out = self._lists()
        _raises(
            (TypeError, ValueError),
            r"predict(\[1\])?",
            lambda: st.sgd_step_(
                w,
                g,
                v,
                lr=0.1,
                momentum=0.9,
                predict=[(1.0, out), bad],  # type: ignore[list-item]
            ),
            (w, g, v, out),
        )


class TestPlanRefresh:
    """A refresh validates gradients like the constructor, and keeps the old ones if it refuses."""

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (torch.ones(3, 4), ValueError),
            (torch.ones(3, 4).t(), ValueError),
            (torch.ones(SHAPE, dtype=torch.float64), ValueError),
            (torch.ones(SHAPE, dtype=torch.int32), TypeError),
            (torch.empty(SHAPE, device="meta"), TypeError),
            (torch.eye(*SHAPE).to_sparse(), TypeError),
            (torch.ones(1, 3).expand(SHAPE), ValueError),
            ("gradient", TypeError),
        ],
        ids=["shape", "strides", "float64", "int32", "meta", "sparse", "expanded", "string"],
    )
    def test_bad_gradients(self, bad: object, error: type[Exception]) -> None:
        w = [torch.zeros(SHAPE) for _ in range(COUNT)]
        plan = st.Plan(w, grads=[torch.ones(SHAPE) for _ in range(COUNT)])
        grads: list[object] = [torch.full(SHAPE, 7.0) for _ in range(COUNT)]
        grads[BAD] = bad
        _raises(error, r"grads\[3\]", lambda: plan.refresh(grads), w)  # type: ignore[arg-type]
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert all(bool((t == -1.0).all()) for t in w)

    def test_a_gradient_that_overlaps_what_is_written(self) -> None:
        w = [torch.zeros(SHAPE) for _ in range(COUNT)]
        plan = st.Plan(w, grads=[torch.ones(SHAPE) for _ in range(COUNT)])
        grads = [torch.ones(SHAPE) for _ in range(COUNT)]
        grads[1] = w[BAD]
        _raises(ValueError, r"grads\[1\]|params\[3\]", lambda: plan.refresh(grads), (w, grads))

    def test_sparse_gradients_of_an_embedding(self) -> None:
        table = torch.nn.Embedding(4, 3, sparse=True)
        plan = st.Plan(list(table.parameters()))
        table(torch.tensor([1, 2])).sum().backward()
        _raises(
            TypeError, r"grads\[0\]", lambda: plan.refresh(), list(table.parameters()), "sparse"
        )
