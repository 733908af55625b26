"""Tests that a Plan refuses calls that cannot be, names the argument, and changes nothing."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.bad_input import raises

import spectrain_ext as st
from spectrain_ext import laws

_FRACTION = laws.Geometric(1.5)
#: A call of a plan, its error, and the message.
Row = tuple[Callable[[Any], object], type[Exception] | tuple[type[Exception], ...], str]
_NUMBERS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
_ADAM: dict[str, Any] = {"lr": 0.1, "step": 1}
_ONE: dict[str, Any] = {"lr": 0.1, "steps": 1.0}


_ARGUMENTS: list[Row] = [
    # Numbers that are missing, or of another rule.
    (lambda p: p.sgd_step_(), TypeError, "sgd_step_.*'lr'"),
    (lambda p: p.sgd_step_(lr=0.1), TypeError, "'momentum'"),
    (lambda p: p.adam_step_(), TypeError, "adam_step_.*'lr'"),
    (lambda p: p.adam_step_(lr=0.1), TypeError, "'step'"),
    (lambda p: p.predict(steps=1.0), TypeError, "'lr'"),
    (lambda p: p.predict(steps=1.0, step=1), TypeError, "'lr'"),
    (lambda p: p.predict(steps=1.0, lr=0.1, step=1, momentum=0.9), TypeError, "'momentum'"),
    (lambda p: p.adam_step_(lr=0.1, step=1, momentum=0.9), TypeError, "unexpected.*'momentum'"),
    (lambda p: p.sgd_step_(clip=1, **_NUMBERS), TypeError, "unexpected keyword argument 'clip'"),
    # Horizons and laws.
    (lambda p: p.sgd_step_(predict=[-1], **_NUMBERS), ValueError, r"predict\[0\]"),
    (lambda p: p.predict(lr=0.1, steps="x"), TypeError, "^steps"),
    (lambda p: p.predict(steps=_FRACTION, weight_decay=0.1, **_NUMBERS), ValueError, "whole"),
    (lambda p: p.predict(lr=-1.0, steps=1.0), ValueError, "^lr"),
    (lambda p: p.stash_predict_(lr=0.1, steps=math.nan), ValueError, "^steps"),
    (lambda p: p.extrapolate(steps=math.inf), ValueError, "^steps"),
    (lambda p: p.sgd_step_(predict=[math.nan], **_NUMBERS), ValueError, "predict"),
    (lambda p: p.sgd_step_(predict=[1.0, 1.0], **_NUMBERS), ValueError, "predict: .*1 outs, got 2"),
    (lambda p: p.adam_step_(**_ADAM, predict=[1.0, None]), ValueError, "predict: .*1 outs"),
    (lambda p: p.sgd_step_(first_step=[True], **_NUMBERS), TypeError, "^first_step: .* a bool"),
    # Momentum.
    (lambda p: p.sgd_step_(lr=0.1, momentum=0.0, predict=[1.0]), ValueError, "momentum > 0"),
    # Outputs.
    *[
        (call, error, "^out: expected an index")
        for out, error in ((1, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError))
        for call in (
            lambda p, out=out: p.predict(out=out, **_ONE),
            lambda p, out=out: p.extrapolate(steps=1.0, out=out),
            lambda p, out=out: p.write_out(out=out),
        )
    ],
]


@pytest.mark.parametrize("row", _ARGUMENTS, ids=lambda row: row[2])
def test_arguments_that_cannot_be(row: Row) -> None:
    w, g, m, u, kept, out = lists = [[torch.rand(3), torch.rand(3)] for _ in range(6)]
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, stashed=kept, outs=[out])
    call, error, says = row
    raises(error, says, lambda: call(plan), lists)


_BARE: list[Row] = [
    (lambda p: p.predict_(**_ONE), ValueError, "momentum_buffers"),
    (lambda p: p.predict_(steps=1.0, **_ADAM), ValueError, "exp_avgs"),
    (lambda p: p.stash_predict_(**_ONE), ValueError, "stashed|momentum_buffers"),
    (lambda p: p.sgd_step_(**_NUMBERS), ValueError, "momentum_buffers"),
    (lambda p: p.adam_step_(**_ADAM), ValueError, "exp_avgs"),
    (lambda p: p.stash(), ValueError, "stashed"),
    (lambda p: p.restore_(), ValueError, "stashed"),
    (lambda p: p.swap_(), ValueError, "stashed"),
    (lambda p: p.extrapolate(steps=1.0), ValueError, "previous|stashed|out"),
    (lambda p: p.write_out(out=3), ValueError, "^out"),
    *[
        (call, ValueError, rf"^{name}: the plan has no outs to write .*Plan\(..., outs=\[...\]\)")
        for name, call in (
            ("out", lambda p: p.predict(**_ONE)),
            ("out", lambda p: p.write_out()),
            ("out", lambda p: p.extrapolate(steps=1.0)),
            ("predict", lambda p: p.sgd_step_(predict=[1.0], **_NUMBERS)),
            ("predict", lambda p: p.adam_step_(**_ADAM, predict=[1.0])),
        )
    ],
]


@pytest.mark.parametrize("row", _BARE, ids=lambda row: row[2])
def test_lists_that_are_missing(row: Row) -> None:
    call, error, says = row
    w = torch.rand(4)
    plan = st.Plan(w, grads=torch.ones(4))
    raises(error, says, lambda: call(plan), w)


def test_moments_and_gradients_that_are_missing() -> None:
    w, m, u = lists = [torch.rand(4) for _ in range(3)]
    one = st.Plan(w, exp_avgs=m, grads=torch.ones(4), stashed=torch.zeros(4))
    for call in (
        lambda: one.adam_step_(**_ADAM),
        lambda: one.predict_(steps=1.0, **_ADAM),
        lambda: one.stash_predict_(steps=1.0, **_ADAM),
    ):
        raises(ValueError, "exp_avg_sqs", call, lists)
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u)
    raises(ValueError, "grads", lambda: plan.adam_step_(**_ADAM), lists)
    raises(TypeError, "outs: expected a sequence of outputs", lambda: st.Plan(w, outs=m), lists)
    both = {"momentum_buffers": m, "exp_avgs": u}
    raises(ValueError, "exp_avgs: momentum_buffers are given", lambda: st.Plan(w, **both), lists)


def test_pickle_and_copies() -> None:
    plan = st.Plan(torch.zeros(3), stashed=torch.zeros(3))
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="Plan"):
            copied(plan)
