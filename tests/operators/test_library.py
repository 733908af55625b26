"""Tests torch.ops.spectrain: schemas, versions, fake kernels, and compiled functions."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators import library
from spectrain_ext.operators.calls import StepOptions
from spectrain_ext.operators.laws import Geometric, Linear, SecondOrder

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
_ops = torch.ops.spectrain


def _list(requires_grad: bool = False) -> list[Tensor]:
    return [torch.rand(3, 2).requires_grad_(requires_grad), torch.rand(5, 4).t()]


# Arguments of every operator. The schema marks some lists as written.
_ARGUMENTS: dict[str, Callable[[bool], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "predict_": lambda g: ((_list(g), _list()), {"lr": 0.1, "steps": [2.0]}),
    "predict": lambda g: ((_list(g), _list()), {"lr": 0.1, "steps": [2.0]}),
    "predict.out": lambda g: (
        (_list(g), _list()),
        {"lr": 0.1, "steps": [2.0], "law": "geometric", "momentum": 0.9, "outs": _list()},
    ),
    "stash": lambda g: ((_list(g),), {}),
    "stash.out": lambda g: ((_list(g),), {"outs": _list()}),
    "restore_": lambda g: ((_list(g), _list()), {}),
    "swap_": lambda g: ((_list(g), _list()), {}),
    "stash_predict_": lambda g: (
        (_list(g), _list(), _list()),
        {"lr": 0.0, "lr_tensor": torch.tensor(0.1), "steps": [2.0]},
    ),
    "sgd_step_": lambda g: (
        (_list(g), [*_list()[:1], torch.rand(5, 4).t()], _list()),
        {
            "lr": 0.1,
            "momentum": 0.9,
            "outs": _list() + _list(),
            "horizons": [1.0, 2.0, 1.0],
            "laws": ["linear", "second_order"],
            "first_step": [True, False],
        },
    ),
    "adam_step_": lambda g: (
        (_list(g), _list(), _list(), _list()),
        {
            "lr": 0.1,
            "step": 3,
            "outs": _list(),
            "horizons": [1.0],
            "grad_scale": torch.tensor(4.0),
            "found_inf": torch.zeros(1),
            "clip_factor": torch.tensor(0.5),
        },
    ),
    "adam_predict": lambda g: (
        (_list(g), _list(), _list()),
        {"lr": 0.1, "step": 3, "steps": [2.0]},
    ),
    "adam_predict.out": lambda g: (
        (_list(g), _list(), _list()),
        {"lr": 0.1, "step": 3, "steps": [2.0], "law": "geometric", "outs": _list()},
    ),
    "extrapolate": lambda g: ((_list(g), _list()), {"steps": 2.0}),
    "extrapolate.out": lambda g: ((_list(g), _list()), {"steps": 2.0, "outs": _list()}),
    "distance": lambda g: ((_list(g), [*_list(), *_list(), *_list()]), {"count": 3}),
}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ops, packet), overload or "default")


def test_every_schema_has_arguments_here() -> None:
    assert [schema.partition("(")[0] for schema in library.SCHEMAS] == list(_ARGUMENTS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", _ARGUMENTS)
def test_opcheck(name: str, requires_grad: bool) -> None:
    args, kwargs = _ARGUMENTS[name](requires_grad)
    torch.library.opcheck(_overload(name), args, kwargs)


@pytest.mark.parametrize("name", _ARGUMENTS)
def test_what_the_schema_marks_is_written_and_bumped_and_nothing_else(name: str) -> None:
    overload = _overload(name)
    args, kwargs = _ARGUMENTS[name](False)
    given = {
        argument.name: (value, argument.alias_info is not None and argument.alias_info.is_write)
        for argument, value in [
            *zip(overload._schema.arguments, args, strict=False),
            *((a, kwargs[a.name]) for a in overload._schema.arguments if a.name in kwargs),
        ]
        if "List[Tensor]" in str(argument.type) or "List[Optional[Tensor]]" in str(argument.type)
    }
    before = {key: [t.clone() for t in lists] for key, (lists, _) in given.items()}
    overload(*args, **kwargs)
    assert any(written for _, written in given.values()) != (name in (*_NEW, "distance"))
    for key, (lists, written) in given.items():
        for i, (t, was) in enumerate(zip(lists, before[key], strict=True)):
            assert t._version == int(written), f"{key}[{i}]"
            assert torch.equal(t, was) is not written, f"{key}[{i}]"


_NEW = ("predict", "stash", "adam_predict", "extrapolate")


@pytest.mark.parametrize("name", _NEW)
def test_new_tensors_have_the_layout_of_the_parameters_and_no_history(name: str) -> None:
    args, kwargs = _ARGUMENTS[name](True)
    new = _overload(name)(*args, **kwargs)
    for t, like in zip(new, args[0], strict=True):
        assert t.stride() == like.stride() and not t.requires_grad
        assert t.data_ptr() != like.data_ptr()


def test_a_write_between_forward_and_backward_raises() -> None:
    w = torch.ones(3, requires_grad=True)
    loss = (w * w).sum()
    _ops.predict_([w], [torch.ones(3)], lr=0.1, steps=[1.0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_empty_lists() -> None:
    _ops.predict_([], [], lr=0.1, steps=[1.0])
    assert _ops.stash([]) == []


@pytest.mark.parametrize(
    "law",
    [
        2.5,
        Linear(3.0),
        Geometric(2.0),
        SecondOrder(3.0, 1.0),
    ],
)
def test_laws_survive_the_schema(law: Any) -> None:
    expected = law if not isinstance(law, float) else Linear(law)
    assert library._decoded(*library._encoded(law)) == expected


class TestBadInput:
    """Errors that only the flat forms of the schemas can have."""

    @pytest.mark.parametrize(
        ("law", "steps"), [("cubic", [1.0]), ("linear:x", [1.0]), ("rates:x", [0.1])]
    )
    def test_an_unknown_law(self, law: str, steps: list[float]) -> None:
        w = torch.zeros(3)
        with pytest.raises(ValueError, match="law"):
            _ops.predict_([w], [torch.ones(3)], lr=0.1, steps=steps, law=law)
        assert not w.any() and w._version == 0

    @pytest.mark.parametrize(("law", "steps"), [("linear", []), ("geometric", [1.0, 2.0])])
    def test_too_few_or_too_many_numbers(self, law: str, steps: list[float]) -> None:
        with pytest.raises(ValueError, match="steps: expected 1 numbers"):
            _ops.predict([torch.zeros(3)], [torch.ones(3)], lr=0.1, steps=steps, law=law)

    @pytest.mark.parametrize(
        "predictions",
        [
            {"outs": 1, "horizons": [1.0]},
            {"outs": 2, "horizons": []},
            {"outs": 2, "horizons": [1.0, 2.0]},
            {"outs": 2, "horizons": [1.0, 2.0], "laws": ["linear"]},
            {"outs": 2, "horizons": [1.0], "laws": ["linear", "linear"]},
        ],
    )
    def test_outs_that_do_not_match_the_horizons(self, predictions: dict[str, Any]) -> None:
        w, g, v = ([torch.zeros(3), torch.zeros(3)] for _ in range(3))
        outs = [torch.zeros(3) for _ in range(predictions.pop("outs"))]
        with pytest.raises(ValueError, match=r"outs|steps"):
            _ops.sgd_step_(w, g, v, lr=0.1, momentum=0.9, outs=outs, **predictions)

    @pytest.mark.parametrize("count", [0, 2])
    def test_others_that_do_not_match_their_count(self, count: int) -> None:
        with pytest.raises(ValueError, match=f"others: expected {count} times 1 tensors, got 1"):
            _ops.distance([torch.zeros(3)], [torch.zeros(3)], count=count)

    def test_an_operators_own_errors(self) -> None:
        with pytest.raises(ValueError, match=r"momentum_buffers\[0\]: expected shape"):
            _ops.predict_([torch.zeros(3)], [torch.zeros(4)], lr=0.1, steps=[1.0])


# The package's operators inside compiled functions

_NO_COMPILER = not any(shutil.which(name) for name in ("g++", "clang++", "c++"))
_INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.compiler,
        pytest.mark.skipif(_NO_COMPILER, reason="inductor needs a C++ compiler"),
    ],
)
Lists = list[list[Tensor]]
_CALLS: dict[str, Callable[[Lists], Any]] = {
    "predict_": lambda x: st.predict_(x[0], x[1], lr=0.1, steps=2),
    "predict_ by a law": lambda x: st.predict_(
        x[0], x[1], lr=0.1, steps=_GEOMETRIC, momentum=0.9, nesterov=True
    ),
    "predict": lambda x: st.predict(x[0], x[1], lr=0.1, steps=2.0),
    "predict one": lambda x: st.predict(x[0][0], x[1][0], lr=0.1, steps=2),
    "predict out": lambda x: st.predict(x[0], x[1], lr=0.1, steps=2.0, out=x[2]),
    "stash": lambda x: st.stash(x[0]),
    "stash out": lambda x: st.stash(x[0], x[1]),
    "restore_": lambda x: st.restore_(x[0], x[1]),
    "swap_": lambda x: st.swap_(x[0], x[1]),
    "stash_predict_": lambda x: st.stash_predict_(x[0], x[1], x[2], lr=0.1, steps=1.0),
    "sgd_step_": lambda x: st.sgd_step_(
        x[0],
        [None, x[1][1]],
        x[2],
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
        first_step=[False, True],
        predict=[(2.0, x[3]), (_GEOMETRIC, x[4])],
    ),
    "sgd_step_ one without momentum": lambda x: st.sgd_step_(
        x[0][0], x[1][0], None, lr=0.1, momentum=0.0, maximize=True
    ),
    "sgd_step_ with scalars": lambda x: st.sgd_step_(
        x[0],
        x[1],
        x[2],
        lr=0.1,
        momentum=0.9,
        grad_scale=torch.full((1,), 3.0),
        found_inf=torch.zeros(()),
        clip_factor=x[3][0].sum(),
    ),
    "adam_step_": lambda x: st.adam_step_(
        x[0],
        x[1],
        x[2],
        x[3],
        lr=0.1,
        step=3,
        betas=(0.8, 0.99),
        weight_decay=0.01,
        decoupled_weight_decay=True,
        predict=[(2.0, x[4])],
    ),
    "adam_predict": lambda x: st.adam_predict(x[0], x[1], x[2], lr=0.1, step=2, steps=3.0),
    "extrapolate": lambda x: st.extrapolate(x[0], x[1], steps=2.0),
    "extrapolate out": lambda x: st.extrapolate(x[0], x[1], steps=2.0, out=x[2]),
    "distance": lambda x: st.distance(x[0], [x[1], x[2]]),
    "distance one": lambda x: st.distance(x[0][1], [x[1][1]]),
    "distance none": lambda x: st.distance(x[0], []),
}
_GEOMETRIC = Geometric(3.0)


@pytest.fixture(autouse=True)
def _compile_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    # A cached graph of an earlier run would hide changes of the operators' registrations.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def _same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if a is not None:
        for x, y in zip(*([t] if isinstance(t, Tensor) else t for t in (a, b)), strict=True):
            assert torch.equal(x, y) and x.stride() == y.stride()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", _CALLS)
def test_compiled_calls_do_what_eager_ones_do(name: str, backend: str) -> None:
    call = _CALLS[name]
    lists = [_list() for _ in range(5)]
    copies = [[t.clone() for t in tensors] for tensors in lists]
    result = torch.compile(call, backend=backend, fullgraph=True)(lists)
    _same(result, call(copies))
    for k, (tensors, expected) in enumerate(zip(lists, copies, strict=True)):
        _same(tensors, expected)
        # A schema covers whole lists: a tensor without a gradient gets a new version like the
        # others.
        assert any(t._version for t in tensors) == any(t._version for t in expected), f"list {k}"
        for i, (t, e) in enumerate(zip(tensors, expected, strict=True)):
            assert t._version > 0 or e._version == 0, f"list {k}, tensor {i}"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_training_step_compiles_once_for_all_learning_rates(backend: str) -> None:
    """It compiles once more when lr and step first change, as always under torch.compile."""

    def update(x: Lists, lr: float, step: int) -> Tensor:
        grads = [w.detach() * 2 for w in x[0]]
        st.sgd_step_(x[0], grads, x[1], lr=lr, momentum=0.9, predict=[(2, x[2])])
        st.adam_step_(x[0], grads, x[1], x[3], lr=lr, step=step)
        return st.predict(x[0][0], x[1][0], lr=lr, steps=1) + x[2][0]

    lists = [_list() for _ in range(4)]
    lists[0][0].requires_grad_()
    copies = [[t.detach().clone() for t in tensors] for tensors in lists]
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(update, backend=backend, fullgraph=True)
    for i in range(12):
        result = compiled(lists, 0.1 / (i + 1), i + 1)
        torch.testing.assert_close(result, update(copies, 0.1 / (i + 1), i + 1))
    for tensors, expected in zip(lists, copies, strict=True):
        _same([t.detach() for t in tensors], expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.parametrize("backend", ["aot_eager", _INDUCTOR])
def test_values_computed_in_the_graph_are_those_before_the_writes(backend: str) -> None:
    """Inductor may recompute a value at its use, but not after its weights have changed."""

    def call(x: Lists) -> list[Tensor]:
        g = [w * 2 for w in x[0]]
        st.predict_(x[0], g, lr=0.1, steps=1)
        new = [torch.empty_like(w) for w in x[1]]
        st.stash_predict_(x[1], new, g, lr=0.1, steps=1)
        st.swap_(x[2], new)
        return new

    lists = [_list() for _ in range(3)]
    copies = [[t.clone() for t in tensors] for tensors in lists]
    _same(torch.compile(call, backend=backend, fullgraph=True)(lists), call(copies))
    for tensors, expected in zip(lists, copies, strict=True):
        _same(tensors, expected)


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_whose_backward_needs_what_it_overwrites_raises(backend: str) -> None:
    def call(w: Tensor, v: Tensor) -> Tensor:
        loss = (w * w).sum()
        st.predict_(w, v, lr=0.1, steps=1)
        return loss

    w = torch.ones(3, requires_grad=True)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    with pytest.raises(Exception, match="modified by an inplace operation"):
        compiled(w, torch.ones(3)).backward()


def test_a_prediction_in_a_graph_is_a_constant_for_autograd() -> None:
    def call(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return (st.predict(w, v, lr=0.1, steps=2) * x + w * w).sum()

    w, v, x = torch.rand(3, requires_grad=True), torch.rand(3), torch.rand(3)
    torch.compile(call, backend="aot_eager", fullgraph=True)(w, v, x).backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad, 2 * w.detach())


def test_a_learning_rate_may_be_a_tensor() -> None:
    lists = [_list() for _ in range(2)]
    copies = [[t.clone() for t in tensors] for tensors in lists]
    rate = torch.tensor(0.3)
    torch.compile(
        lambda x, lr: st.predict_(x[0], x[1], lr=lr, steps=2.0), backend="aot_eager", fullgraph=True
    )(lists, rate)
    st.predict_(copies[0], copies[1], lr=rate.item(), steps=2.0)
    _same(lists[0], copies[0])


def test_a_graph_works_on_the_current_stream() -> None:
    compiled = torch.compile(lambda x: st.stash(x, stream=3), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="stream"):
        compiled([torch.ones(2)])


def test_a_plan_breaks_the_graph_and_says_what_to_do_where_it_may_not() -> None:
    w, v, out = torch.randn(4), torch.randn(4), torch.zeros(4)
    plan = st.Plan(w, momentum_buffers=v, outs=[out])

    def call(x: torch.Tensor) -> torch.Tensor:
        plan.predict(lr=0.1, steps=2.0)
        return out * x

    expected = st.predict(w, v, lr=0.1, steps=2.0) * 3
    assert torch.equal(torch.compile(call, backend="eager")(torch.tensor(3.0)), expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"a Plan holds addresses.*spectrain_ext\.sgd_step_"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.tensor(3.0))


@pytest.mark.parametrize("name", sorted({name.partition(".")[0] for name in _ARGUMENTS}))
def test_a_graph_takes_what_the_operator_takes(name: str) -> None:
    """In the schema's form or another."""
    schema = {a.name for a in getattr(_ops, name).default._schema.arguments}
    takes = set(inspect.signature(getattr(st, name)).parameters)
    if "options" in takes:
        takes = takes - {"options"} | set(StepOptions.__annotations__)
    assert takes - schema <= {"betas", "predict", "zero_grad", "out", "stream"}
