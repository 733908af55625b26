"""Tests invalid numbers, laws and options of operators, and invalid gradients of a refresh."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.bad_input import raises
from helpers.operator_table import BY_NAME, COUNT, SHAPE, Op

import spectrain_ext as st
from spectrain_ext import laws

NAN, INF = math.nan, math.inf
SGD = ["predict_", "predict", "stash_predict_"]
ADAM = ["adam_step_", "adam_predict"]
STEPS = ["sgd_step_", "adam_step_"]
AHEAD = [*SGD, "adam_predict"]  # take lr and steps
NO_NUMBER = ("0.1", None, [0.1], 1j, object())
NO_BETAS = ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), (0.9,), (0.9, 0.9, 0.9))
#: An error, operators, some of their arguments, and values that raise it. The linear law also
#: rejects numbers that it does not use.
BAD: list[tuple[Any, list[str], str, tuple[Any, ...]]] = [
    (ValueError, [*AHEAD, *STEPS], "lr steps", (-1.0, -1e-300, NAN, -INF)),
    (ValueError, ["extrapolate"], "steps", (-1.0, NAN, INF)),
    (ValueError, [*SGD, "sgd_step_"], "momentum", (-0.1, NAN)),
    (ValueError, [*SGD, *STEPS, "adam_predict"], "weight_decay", (-1.0, NAN)),
    (ValueError, ["sgd_step_"], "dampening", (NAN,)),
    (ValueError, ADAM, "eps", (-1e-8, NAN, INF)),
    (ValueError, ADAM, "step", (0, -3, 1.5, NAN)),
    (ValueError, ADAM, "betas", NO_BETAS),
    (ValueError, ["adam_step_"], "mu_product momentum_decay", (-0.1, NAN, INF)),
    (TypeError, [*AHEAD, *STEPS], "lr steps", NO_NUMBER),
    (TypeError, ["sgd_step_"], "momentum dampening weight_decay", NO_NUMBER),
    (TypeError, ADAM, "eps step weight_decay", NO_NUMBER),
    ((TypeError, ValueError), ADAM, "betas", NO_NUMBER),
]


@pytest.mark.parametrize(
    ("op", "error", "name", "bad"),
    [
        pytest.param(BY_NAME[op], error, name, bad, id=f"{op}-{name}={bad!s:.9}")
        for error, ops, names, values in BAD
        for op in ops
        for name in names.split()
        for bad in values
    ],
)
def test_a_bad_number(op: Op, error: Any, name: str, bad: object) -> None:
    """It is named, and its value if it is a number; also where there is nothing to do."""
    nadam = {"mu_product": 0.5, "momentum_decay": 4e-3} if name.startswith("m") else {}
    options = {name: bad} if op.name != "adam_step_" else {**nadam, name: bad}
    named = r"predict\[1\]" if name == "steps" and op.name in STEPS else name
    said = re.escape(repr(bad)) if isinstance(bad, float) else ""
    for lists in (op.build(), {key: [] for key in op.lists}):
        message = rf"^{named}(\[[01]\])?: .*{said}"
        raises(error, message, lambda lists=lists: op(lists, **options), lists)


#: An operator, what is wrong, the error and its message.
CALLS: list[tuple[str, dict[str, Any], Any, str]] = [
    ("sgd_step_", {"momentum": 0.0}, ValueError, "^predict: .*momentum"),
    ("sgd_step_", {"momentum": 0.0, "momentum_buffers": None}, ValueError, "^predict: .*momentum"),
    ("sgd_step_", {"momentum_buffers": None, "predict": []}, ValueError, "^momentum_buffers: "),
    ("sgd_step_", {"nesterov": True, "dampening": 0.1}, ValueError, "^nesterov: "),
    *(("sgd_step_", {"first_step": x}, TypeError, "^first_step: ") for x in ([True], "yes", None)),
    ("sgd_step_", {"clip": None}, TypeError, "unexpected keyword argument 'clip'"),
    # the default of 1 would divide by zero
    ("adam_step_", {"momentum_decay": 4e-3}, ValueError, "^mu_product: "),
    ("adam_step_", {"steps": INF}, ValueError, r"^predict\[1\]: "),
    ("adam_predict", {"steps": laws.Geometric(65)}, ValueError, "^steps: .*at most 64 updates"),
    ("predict_", {"steps": laws.Geometric(2)}, ValueError, "^momentum: .*Geometric"),
]


@pytest.mark.parametrize(("op", "wrong", "error", "message"), CALLS)
def test_a_bad_option(op: str, wrong: dict[str, Any], error: Any, message: str) -> None:
    lists = BY_NAME[op].build()
    raises(error, message, lambda: BY_NAME[op](lists, **wrong), lists)


@pytest.mark.parametrize("op", STEPS)
@pytest.mark.parametrize("bad", [3, (1.0,), (1.0, None, None), ("x", None), None], ids=repr)
def test_an_entry_of_predict_that_is_no_pair(op: str, bad: object) -> None:
    lists = BY_NAME[op].build()
    options = {"predict": [(1.0, lists["predict0"]), bad]}
    error = (TypeError, ValueError)
    raises(error, r"predict\[1\]", lambda: BY_NAME[op](lists, **options), lists)


@pytest.mark.parametrize("law", [laws.Linear, laws.Geometric, laws.SecondOrder])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((bad, ValueError) for bad in (-1.0, NAN, INF)),
        *((bad, TypeError) for bad in ("1", None, 1j)),
    ],
)
def test_a_bad_number_of_a_law(law: Any, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^(steps|delay): "):
        law(value)
    with pytest.raises(ValueError, match=r"^lead: "):
        laws.SecondOrder(1.0, -1.5)


@pytest.mark.parametrize(
    ("steps", "came"),
    [
        (laws.Geometric, "the class Geometric"),
        ("geometric", "'geometric'"),
        (True, "True"),
        (None, "None"),
    ],
    ids=str,
)
def test_all_messages_use_the_same_words_and_name_a_law(steps: Any, came: str) -> None:
    w, v, g, out = (torch.randn(9) for _ in range(4))
    plan = st.Plan(w, momentum_buffers=v, grads=g, stashed=torch.zeros(9), outs=[out])
    numbers: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    for one in (1, 1.0):  # equal to True, and remembered
        plan.sgd_step_(**numbers, predict=[one])
    optimizer = st.optim.SGD([torch.ones(2, requires_grad=True)], **numbers)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("steps", lambda: st.predict_(w, v, lr=0.1, steps=steps)),
        ("steps", lambda: plan.predict_(lr=0.1, steps=steps)),
        ("steps", lambda: plan.extrapolate(steps=steps)),
        ("steps", lambda: laws.Linear(steps)),
        ("steps", lambda: optimizer.predict_(steps)),
        ("predict[0]", lambda: st.sgd_step_(w, g, v, **numbers, predict=[(steps, out)])),
    ]
    if steps is not None:  # a plan then skips the out
        calls.append(("predict[0]", lambda: plan.sgd_step_(**numbers, predict=[steps])))
    for name, call in calls:
        with pytest.raises(TypeError, match=rf"^{re.escape(name)}: expected a number of ") as e:
            call()
        assert str(e.value).endswith(f"got {came}")
        assert steps is None or "laws.Geometric(2)" in str(e.value)


@pytest.mark.parametrize("n_terms", [2, 9, 65])
def test_a_law_of_ones_own_with_more_terms_than_sgd_takes(n_terms: int) -> None:
    class Own:
        def sgd(self, numbers: laws.SgdNumbers) -> list[laws.Term]:
            return [laws.Term(1.0, numbers.lr)] * n_terms

        def adam(self, numbers: laws.AdamNumbers) -> list[laws.Term]:
            return []

    for op in ("predict", "sgd_step_"):
        lists = BY_NAME[op].build()
        with pytest.raises(ValueError, match=rf"^steps: expected at most one .* {n_terms}$"):
            BY_NAME[op](lists, steps=Own(), momentum=0.9)


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
def test_a_refresh_with_bad_gradients_keeps_the_old_ones(bad: Any, error: type[Exception]) -> None:
    w, old, new = ([torch.full(SHAPE, x) for _ in range(COUNT)] for x in (0.0, 1.0, 7.0))
    plan = st.Plan(w, grads=old)
    new[3] = bad
    raises(error, r"grads\[3\]", lambda: plan.refresh(new), w)
    raises(ValueError, "grads", lambda: plan.refresh(old[1:]), w)
    written = [old[0], w[3], *old[2:]]
    raises(ValueError, r"grads\[1\]|params\[3\]", lambda: plan.refresh(written), w)
    plan.sgd_step_(lr=1.0, momentum=0.0)
    assert all(bool((t == -1.0).all()) for t in w)
