"""Tests compiled calls of operators, and torch.ops.spectrain: inner, because it declares one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config
from helpers.operator_table import BY_NAME, OPS, Lists, Op, alone
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

import spectrain_ext as st
from spectrain_ext import laws
from spectrain_ext.operators.calls import Tensors, Written
from spectrain_ext.operators.laws import Horizon
from spectrain_ext.operators.library import operator

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
_ops = torch.ops.spectrain
_NO_COMPILER = not any(shutil.which(name) for name in ("g++", "clang++", "c++"))
_MARKS = [pytest.mark.compiler, pytest.mark.skipif(_NO_COMPILER, reason="needs a C++ compiler")]


def _lists(op: Op) -> Lists:
    return {name: [torch.rand(3, 2), torch.rand(5, 4).t()] for name in op.lists}


def _new(lists: Lists) -> Lists:
    return {name: given for name, given in lists.items() if name != "out"}


def _params(lists: Lists) -> Lists:
    return {"params": lists["params"]}


def _without_momentum(lists: Lists) -> Lists:
    return {"params": lists["params"][0], "grads": lists["grads"][0], "momentum_buffers": None}


def _bfloat16_without_a_gradient(lists: Lists) -> Lists:
    narrow = {name: [t.bfloat16() for t in given] for name, given in lists.items()}
    return {**narrow, "grads": [None, narrow["grads"][1]]}


def _gated(*, stashed: list[Tensor], **lists: Any) -> None:
    gate = {"grad_scale": torch.full((1,), 3.0), "found_inf": torch.zeros(())}
    st.sgd_step_(**lists, lr=0.1, momentum=0.9, clip_factor=stashed[0].sum(), **gate)


_AHEAD_BY = laws.SecondOrder(2.0, 1.0)


@operator
def declared_(
    params: Written,
    state: Written | None = None,
    *,
    lr: float = 0.25,
    betas: tuple[float, float] = (0.5, 0.6),
    steps: Horizon = _AHEAD_BY,
    eps: float = 1e-3,
    decay: float | None = 0.75,
    nesterov: bool = True,
    predict: Sequence[tuple[Horizon, Tensors]] = (),
    stream: Any = None,
) -> None:
    """Fill all tensors with a sum of all numbers, whose defaults no operator of the package has."""
    horizons = [laws.as_law(each) for each in (steps, *(horizon for horizon, _ in predict))]
    of_laws = [getattr(law, name) for law in horizons for name in law.__match_args__]
    numbers = (lr, *betas, eps, -1.0 if decay is None else decay, nesterov, *of_laws)
    with torch.no_grad():
        for tensor in [*params, *(state or ()), *(t for _, out in predict for t in out)]:
            tensor.fill_(sum(float(x) * 3.0**i for i, x in enumerate(numbers)))


@operator
def bare_(
    params: Written,
    *,
    lr: float,
    betas: tuple[float, float],
    predict: Sequence[tuple[Horizon, Tensors]],
) -> None:
    """Have no defaults."""
    declared_(params, lr=lr, betas=betas, predict=predict)


_DECLARED = Op("declared_", declared_, "params! state!")
_BARE = Op("bare_", bare_, "params! predict0! predict1!", {"lr": 0.1, "betas": (0.2, 0.3)})
_GATED = Op("sgd_step_", _gated, "params! grads momentum_buffers! stashed")
_DISTANCE = Op("distance", lambda params, a, b: st.distance(params, [a, b]), "params a b")
_NONE = Op("distance", lambda params: st.distance(params, []), "params")
_GEOMETRIC = {"steps": laws.Geometric(3.0), "momentum": 0.9, "nesterov": True}
_DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True}
_SGD = {
    **{"weight_decay": 0.01, "first_step": True, "steps": laws.Geometric(3.0)},
    **{"zero_grad": True, "rounding_seed": 2**62, "dampening": 0.5},
}
_SMOOTHED = {"smoothed": True, "nesterov": True, **_DECOUPLED, "first_step": True}
_ADAM = {
    **{"betas": (0.8, 0.99), "steps": laws.SecondOrder(3.0, 1.0), "zero_grad": True},
    **{**_DECOUPLED, "eps": 1e-3, "maximize": True},
}
_NADAM = {"momentum_decay": 0.1, "mu_product": 0.5}
_LION = {"betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True, "zero_grad": True}
_AHEAD = {"betas": (0.8, 0.99), "eps": 1e-3, **_DECOUPLED, "steps": laws.Geometric(3.0)}
#: An operator, what is given of its lists, and options. All schemas are among them.
CALLS: list[tuple[Op, Callable[[Lists], Lists], dict[str, Any]]] = [
    *((op, dict, {}) for op in [*OPS, _GATED, _DISTANCE, _NONE, _DECLARED, _BARE]),
    *((op, _new, {}) for op in OPS if "out" in op.lists),
    *((op, alone, {}) for op in (BY_NAME["predict"], BY_NAME["sgd_step_"], _DISTANCE)),
    *((_DECLARED, _params, options) for options in ({}, {"betas": (0.5, 0.7)}, {"steps": 2})),
    (BY_NAME["predict_"], dict, _GEOMETRIC),
    (BY_NAME["predict_"], dict, {"lr": torch.tensor(0.3)}),
    (BY_NAME["sgd_step_"], dict, {"steps": laws.SecondOrder(3.0, 1.0), "zero_grad": True}),
    (BY_NAME["sgd_step_"], _bfloat16_without_a_gradient, _SGD),
    (BY_NAME["sgd_step_"], _without_momentum, {"momentum": 0.0, "maximize": True}),
    (BY_NAME["sgd_step_"], dict, _SMOOTHED),
    (BY_NAME["adam_step_"], dict, _ADAM),
    (BY_NAME["adam_step_"], dict, _NADAM),
    (BY_NAME["adam_step_"], dict, {"step": torch.tensor(3.0), "lr": torch.tensor(0.3)}),
    (BY_NAME["adam_predict"], dict, _AHEAD),
    (BY_NAME["lion_step_"], dict, _LION),
    (BY_NAME["lion_predict"], dict, {"betas": (0.8, 0.9), "steps": laws.Geometric(3.0)}),
    (BY_NAME["stash_predict_"], dict, {**_GEOMETRIC, "weight_decay": 0.1}),
]


def _each(calls: list[tuple[Op, Callable[[Lists], Lists], dict[str, Any]]]) -> Any:
    ids = [f"{op.name}-{given.__name__}-{'-'.join(options)}" for op, given, options in calls]
    return pytest.mark.parametrize(("op", "given", "options"), calls, ids=ids)


def _schema(op: Op, lists: Lists) -> str:
    return f"{op.name}.{'out' if 'out' in lists else 'default'}"


def _copied(lists: Any, requires_grad: bool = False) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(requires_grad), lists)


@pytest.fixture(autouse=True)
def _compile_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    # A cached graph of an earlier run would hide changes of the operators' registrations.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def _same(a: Any, b: Any) -> None:
    assert tree_structure(a) == tree_structure(b)
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert x is y is None or (torch.equal(x, y) and x.stride() == y.stride())


@pytest.mark.processes
def test_the_first_call_of_an_operator_may_be_a_compiled_one() -> None:
    """It loads the operators while it is traced."""
    program = """
import sys, torch, spectrain_ext as st
assert "spectrain_ext.operators.library" not in sys.modules
call = torch.compile(lambda w: st.predict(w, w, lr=0.5, steps=1), backend="eager")
assert call(torch.ones(3)).tolist() == [0.5] * 3
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_schema_is_called_here() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if "spectrain::" in name}
    called = {_schema(op, given(_lists(op))) for op, given, _ in CALLS}
    assert {f"spectrain::{name.removesuffix('.default')}" for name in called} == registered


@_each(CALLS)
def test_a_compiled_call_does_what_an_eager_one_does(
    op: Op, given: Callable[[Lists], Lists], options: dict[str, Any]
) -> None:
    lists = given(_lists(op))
    copies = _copied(lists)
    compiled = torch.compile(lambda x: op(x, **options), backend="aot_eager", fullgraph=True)
    _same(compiled(lists), op(copies, **options))
    _same(lists, copies)
    for name in op.lists:
        # A schema covers whole lists: a tensor without a gradient gets a new version like the rest.
        if isinstance(lists.get(name), list) and name != "grads":
            versions = [[t._version for t in tensors] for tensors in (lists[name], copies[name])]
            assert any(versions[0]) == any(versions[1]), name
            assert all(now > 0 or was == 0 for now, was in zip(*versions, strict=True)), name


class _Recorded(torch.fx.Interpreter):
    """Runs a graph, and keeps the calls of torch.ops.spectrain in it."""

    def __init__(self, graph: torch.fx.GraphModule, calls: list[tuple[Any, Any, Any]]) -> None:
        super().__init__(graph)
        self.calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", None) == "spectrain":
            self.calls.append((target, *_copied((args, kwargs))))
        return super().call_function(target, args, kwargs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@_each([call for call in CALLS if call[1] in (dict, _new) and not call[2]])
def test_the_operator_in_a_graph_keeps_to_its_schema(
    op: Op, given: Callable[[Lists], Lists], options: dict[str, Any]
) -> None:
    """Its fake and its real kernel agree, and autograd records nothing."""
    calls: list[tuple[Any, Any, Any]] = []
    lists = given(_lists(op))
    torch.compile(
        lambda x: op(x, **options),
        backend=lambda graph, _: _Recorded(graph, calls).run,
        fullgraph=True,
    )(lists)
    ((overload, args, kwargs),) = calls
    assert str(overload) == f"spectrain.{_schema(op, lists)}"
    assert not any(
        t is not None and t.requires_grad for t in tree_leaves(overload(*args, **kwargs))
    )
    kwargs["params" if "params" in kwargs else "a"][0].requires_grad_()
    torch.library.opcheck(overload, args, kwargs)


def test_schemas_have_the_functions_defaults() -> None:
    """And plain numbers for the learning rate, which a graph has as a tensor."""
    w, g, v, u, out = lists = [[torch.rand(4)] for _ in range(5)]
    a, b, c, d, e = copies = _copied(lists)
    _ops.sgd_step_(w, g, v, lr=0.1, momentum=0.9, outs=out, horizons=[2.0])
    st.sgd_step_(a, b, c, lr=0.1, momentum=0.9, predict=[(2.0, e)])
    _ops.predict_(w, v, lr=0.1, steps=[2.0])
    st.predict_(a, c, lr=0.1, steps=2.0)
    _ops.adam_step_(w, g, v, u, lr=0.1, step=3, outs=[])
    st.adam_step_(a, b, c, d, lr=0.1, step=3)
    _same(lists, copies)
    _ops.adam_predict.out(w, v, u, lr=0.1, step=3, steps=[2.0], outs=out)
    st.adam_predict(a, c, d, lr=0.1, step=3, steps=2.0, out=e)
    _same(lists, copies)


@pytest.mark.parametrize(
    ("flat", "options"),
    [
        ({}, {}),
        ({"beta1": 0.5}, {}),
        ({"beta1": 0.9}, {"betas": (0.9, 0.6)}),
        ({"beta2": 0.999}, {"betas": (0.5, 0.999)}),
        ({"steps": [1.0, 2.0]}, {"steps": laws.SecondOrder(1.0, 2.0)}),
        ({"steps": [3.0], "law": "geometric"}, {"steps": laws.Geometric(3.0)}),
        ({"lr_tensor": torch.tensor(0.5), "nesterov": False}, {"lr": 0.5, "nesterov": False}),
        ({"decay": None}, {"decay": None}),
    ],
)
def test_what_a_flat_call_leaves_out_has_the_functions_default(
    flat: dict[str, Any], options: dict[str, Any]
) -> None:
    w, copy = [torch.zeros(3)], [torch.zeros(3)]
    _ops.declared_(w, [], outs=[], **flat)
    declared_(copy, **options)
    _same(w, copy)
    assert w[0].all()


@pytest.mark.parametrize("missing", ["lr", "beta1", "beta2", "outs"])
def test_a_number_without_a_default_is_required(missing: str) -> None:
    given = {"lr": 0.1, "beta1": 0.5, "beta2": 0.6, "outs": []}
    _ops.bare_([torch.zeros(3)], **given)
    with pytest.raises(RuntimeError, match=f"missing value for argument '{missing}'"):
        _ops.bare_([torch.zeros(3)], **{k: v for k, v in given.items() if k != missing})


class _Halved(laws.Linear):
    """A law of a user, which no schema knows."""

    def sgd(self, numbers: laws.SgdNumbers) -> list[laws.Term]:
        return laws.Linear(self.steps / 2).sgd(numbers)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        (BY_NAME["predict_"], {"steps": _Halved(2.0)}),
        (_BARE, {"steps": _Halved(2.0)}),
        (BY_NAME["adam_step_"], {"betas": (0.8, 0.9, 0.99)}),
        (Op("bare_", lambda params: bare_(params, lr=0.1, betas=(0.2, 0.3)), "params!"), {}),
    ],
)
def test_a_graph_refuses_what_its_operator_does_not_have(op: Op, options: dict[str, Any]) -> None:
    lists = _lists(op)
    copies = _copied(lists)
    with pytest.raises(Exception, match=r"steps|horizons|betas|outs|predict|zip"):
        torch.compile(lambda x: op(x, **options), backend="aot_eager", fullgraph=True)(lists)
    _same(lists, copies)


_w, _v = [torch.zeros(3)], [torch.ones(3)]
_FLAT = [torch.zeros(3), torch.zeros(3)]
_STEP = {"lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(
    ("name", "lists", "options", "message"),
    [
        ("predict_", (_w, _v), {"lr": 0.1, "steps": [1.0], "law": "cubic"}, "^law: .*'cubic'"),
        ("predict", (_w, _v), {"lr": 0.1, "steps": [1.0, 2.0]}, "^steps: expected 1 numbers"),
        ("sgd_step_", (_w, _w, _v), {**_STEP, "outs": [], "horizons": [1.0]}, "^outs: "),
        ("sgd_step_", (_w, _w, _v), {**_STEP, "outs": _FLAT, "horizons": [1.0]}, "^outs: "),
        (
            *("sgd_step_", (_w, _w, _v)),
            *({**_STEP, "outs": _w, "horizons": [], "laws": ["linear"]}, "^steps: expected 1"),
        ),
        ("distance", (_w, _w), {"count": 2}, "^others: expected 2 times 1 tensors, got 1"),
        ("restore_", (_w, [torch.ones(4)]), {}, r"^stashed\[0\]: expected shape"),
    ],
)
def test_what_only_the_flat_forms_of_schemas_can_have(
    name: str, lists: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(_ops, name)(*lists, **options)
    assert not _w[0].any() and _w[0]._version == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_training_step_compiles_once_for_all_rates_and_seeds(device: str) -> None:
    """It compiles once more when lr and step first change, as always under torch.compile."""

    def update(x: list[list[Tensor]], lr: float, step: int) -> Tensor:
        grads = [w.detach() * 2 for w in x[0]]
        st.sgd_step_(x[0], grads, x[1], lr=lr, momentum=0.9, predict=[(2, x[2])])
        st.adam_step_(x[0], grads, x[1], x[3], lr=lr, step=step, rounding_seed=step)
        return st.predict(x[0][0], x[1][0], lr=lr, steps=1) + x[2][0]

    kind = {"device": device, "dtype": torch.bfloat16}
    lists = [[torch.rand(3, 2).to(**kind), torch.rand(5, 4).t().to(**kind)] for _ in range(4)]
    lists[0][0].requires_grad_()
    copies = _copied(lists)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(update, backend="aot_eager", fullgraph=True)
    for i in range(8):
        result = compiled(lists, 0.1 / (i + 1), i + 1)
        assert torch.equal(result, update(copies, 0.1 / (i + 1), i + 1))
    _same(lists, copies)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=_MARKS)])
def test_values_computed_in_the_graph_are_those_before_the_writes(backend: str) -> None:
    """Inductor may recompute a value at its use, but not after its weights have changed."""

    def call(x: list[list[Tensor]]) -> list[Tensor]:
        g = [w * 2 for w in x[0]]
        st.predict_(x[0], g, lr=0.1, steps=1)
        new = [torch.empty_like(w) for w in x[1]]
        st.stash_predict_(x[1], new, g, lr=0.1, steps=1)
        st.swap_(x[2], new)
        return new

    lists = [[torch.rand(3, 2), torch.rand(5, 4).t()] for _ in range(3)]
    copies = _copied(lists)
    _same(torch.compile(call, backend=backend, fullgraph=True)(lists), call(copies))
    _same(lists, copies)


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_whose_backward_needs_what_it_overwrites_raises(backend: str) -> None:
    def call(w: Tensor, v: Tensor) -> Tensor:
        loss = (w * w).sum()
        st.predict_(w, v, lr=0.1, steps=1)
        return loss

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    with pytest.raises(Exception, match="modified by an inplace operation"):
        compiled(torch.ones(3, requires_grad=True), torch.ones(3)).backward()


def test_a_graph_works_on_the_current_stream() -> None:
    compiled = torch.compile(lambda x: st.stash(x, stream=3), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="stream"):
        compiled([torch.ones(2)])


def test_a_plan_breaks_the_graph_and_says_what_to_do_where_it_may_not() -> None:
    w, v, out = torch.randn(4), torch.randn(4), torch.zeros(4)
    plan = st.Plan(w, momentum_buffers=v, outs=[out])

    def call(x: Tensor) -> Tensor:
        plan.predict(lr=0.1, steps=2.0)
        return out * x

    expected = st.predict(w, v, lr=0.1, steps=2.0) * 3
    assert torch.equal(torch.compile(call, backend="eager")(torch.tensor(3.0)), expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"a Plan holds addresses.*spectrain_ext\.sgd_step_"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.tensor(3.0))
