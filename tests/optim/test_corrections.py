"""Tests bound optimizers with corrections by stale weights: steps, state, errors."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from helpers import optim_cases as cases
from helpers.covering import Axes, Row
from oracle.corrections import Steps
from torch import Tensor, nn

import spectrain_ext as st

AdaptiveBraking, GapAware = st.corrections.AdaptiveBraking, st.corrections.GapAware
DelayCompensation = st.corrections.DelayCompensation
# By the oracle's name
CORRECTIONS = {"delay": DelayCompensation(0.3), "gap": GapAware(0.9)}
EVERY_CORRECTION = {**CORRECTIONS, "braking": AdaptiveBraking(0.5)}
NUMBERS = {"delay": 0.3, "gap": 0.9, "braking": 0.5}
NAMES = ("SGD", "Adam", "AdamW", "NAdam")


class Stage:
    """An optimizer with a master, whose parameters are in a buffer with other weights."""

    def __init__(
        self, name: str, correction: Any, dtype: torch.dtype = cases.F64, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.wide = cases.F32 if dtype.itemsize == 2 else dtype
        self.params = cases.make_params(dtype)
        self.optimizer = cases.made(name, self.params, **{"weight_decay": 0.05, **options})
        self.master = cases.flat_views(self.params, self.wide, filled=True)
        self.bind(correction)

    def bind(self, correction: Any) -> None:
        keys = (*self.optimizer.buffer_keys, *(correction.buffers if correction else ()))
        self.buffers = {
            key: cases.flat_views(self.params, self.wide) for key in dict.fromkeys(keys)
        }
        self.optimizer.bind(self.master, self.buffers, correction)
        self.own = {p: p.detach() for p in self.params}
        self.optimizer.read_stale(self.own)

    def rebind(self, correction: Any) -> None:
        self.optimizer.unbind()
        self.bind(correction)

    @property
    def weights(self) -> list[Tensor]:
        return cases.bits(self.master.values())

    def stale(self, by: float = 0.05) -> list[Tensor]:
        """Let the parameters have other weights than the true ones."""
        for p, w in self.master.items():
            p.detach().copy_(w + by * torch.randn_like(w))
        return cases.bits(self.params)

    def step(self, none: tuple[int, ...] = ()) -> None:
        cases.give_gradients(self.params, none=none)
        self.optimizer.step()

    def gaps(self) -> list[Any]:
        return [self.optimizer.state[p].get("gap_average") for p in self.params]

    def counts(self) -> list[int]:
        return [int(self.optimizer.state[p]["gap_step"]) for p in self.params]


CASES = Axes(
    {
        "kind": tuple(EVERY_CORRECTION),
        "name": NAMES,
        "dtype": (cases.F64, cases.F32, cases.BF16, cases.F16),
        "maximize": (False, True),
        "weight_decay": (0.0, 0.05),
        "momentum": (0.9, 0.0),
    },
    [
        {"momentum": [0.0], "name": NAMES[1:]},
        {"momentum": [0.0], "kind": ["gap", "braking"]},
        {"kind": ["braking"], "name": NAMES[1:]},
        {"kind": ["braking"], "dtype": [cases.BF16, cases.F16]},  # scales gradients in 16 bits
    ],
).covering()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_steps_are_the_definition(case: Row) -> None:
    """With predictions in the step and alone, other rates, missing and strange gradients."""
    name, kind, options = case["name"], case["kind"], {"maximize": case["maximize"]}
    options["weight_decay"] = case["weight_decay"]
    options |= {"momentum": case["momentum"]} if name == "SGD" else {}
    stage = Stage(name, EVERY_CORRECTION[kind], case["dtype"], **options)
    optimizer, law = stage.optimizer, 2.0 if case["momentum"] else 0.0
    theirs = [nn.Parameter(w.double()) for w in stage.weights]
    reference = getattr(torch.optim, name)(
        theirs, **{**cases.EVERY[name], **options}, foreach=False
    )
    steps = Steps(reference, theirs, (kind, NUMBERS[kind]))
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    if case["dtype"] != cases.F64 or name == "NAdam":  # torch keeps its product of mu in float32
        tolerance = {"rtol": 1e-4, "atol": 1e-5}

    def close(ours: list[Any], expected: list[Any]) -> None:
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a.detach().double(), b.detach(), **tolerance)

    for t in range(7):
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] *= (1.0, 2.0, 0.25)[t % 3]
        old = stage.stale()
        if t % 2:
            optimizer.write_with_next_step(stage.own, law)
        cases.give_gradients(stage.params, none=(1, 5) if t in (0, 3) else ())
        for p, q in zip(stage.params, theirs, strict=True):
            q.grad = None if p.grad is None else p.grad.to(cases.F64, copy=True)
            if t == 5 and kind != "braking":
                p.grad = torch._neg_view(-p.grad)
            elif t == 6 and p.dim() == 2:
                p.grad = p.grad.T.contiguous().T
        optimizer.step()
        steps.step([w.double() for w in old])
        close(stage.weights, theirs)
        assert {w.dtype for w in stage.weights} == {stage.wide}
        if t % 2:  # as written in a separate pass
            written = cases.bits(stage.params)
            optimizer.write_prediction(stage.own, law)
            cases.assert_bits(stage.params, written)
    if kind == "gap":
        buffers = stage.buffers["gap_average"].values()
        assert all(a is buffer for a, buffer in zip(stage.gaps(), buffers, strict=True))
        assert {average.dtype for average in stage.gaps()} == {stage.wide}
        close(stage.gaps(), [steps.squares[q][0] for q in theirs])
        assert stage.counts() == [steps.squares[q][1] for q in theirs]
        rates = steps.largest_lr.values()
        assert [optimizer.param_groups[0]["gap_rate"]] == list(rates)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_begins_and_ends_during_training(name: str, kind: str) -> None:
    """The optimizer's state continues, and the correction's too when it begins again."""
    stage, twin = Stage(name, None), Stage(name, None)
    for seed, (correction, by) in enumerate(((None, 0.0), (CORRECTIONS[kind], 0.0), (None, 0.1))):
        for each, own in ((stage, correction), (twin, None)):
            torch.manual_seed(seed)
            each.rebind(own)
            each.stale(by)
            each.step()
        cases.assert_bits(stage.weights, twin.weights)
    if kind == "gap":
        assert stage.counts() == [1] * 6
        averages = cases.bits(stage.gaps())
        stage.rebind(CORRECTIONS[kind])
        cases.assert_bits(stage.gaps(), averages)
        copied = copy.deepcopy(stage.optimizer).state_dict()["state"]
        assert {"gap_average", "gap_step"} <= copied[0].keys()


def test_second_order_predictions_have_the_corrected_gradient() -> None:
    stage, plain = Stage("SGD", DelayCompensation(0.3)), Stage("SGD", None)
    for _ in range(2):
        weights, stale = stage.weights, stage.stale()
        cases.give_gradients(stage.params, plain.params)
        for p, w, s in zip(plain.params, weights, stale, strict=True):
            p.grad += 0.3 * p.grad**2 * (w - s)
        for each in (stage, plain):
            each.optimizer.write_with_next_step(each.own, st.laws.SecondOrder(2))
            each.optimizer.step()
    for a, b in zip(stage.params, plain.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_the_largest_rate_and_the_count_of_gap_aware() -> None:
    stage = Stage("SGD", GapAware())
    stage.stale()
    stage.step()
    saved = stage.optimizer.state_dict()
    assert stage.counts() == [1] * 6
    del saved["param_groups"][0]["gap_rate"]  # another's group
    stage.optimizer.load_state_dict(saved)
    stage.step()
    assert stage.optimizer.param_groups[0]["gap_rate"] == 0.1


def test_what_cannot_be_corrected() -> None:
    params = cases.make_params()
    optimizer = cases.made("SGD", params)
    views = cases.buffers_for(optimizer)
    cases.refuses(partial(optimizer.bind, None, views, 0.3), TypeError, "correction: expected")
    cases.refuses(partial(optimizer.bind, None, views, GapAware()), ValueError, "gap_average")
    cases.give_gradients(params)
    optimizer.step()  # nothing has changed
    assert optimizer.state[params[0]].keys() == {"momentum_buffer"}
    with pytest.raises(ValueError, match="momentum 0: GapAware"):
        Stage("SGD", GapAware(), momentum=0.0)
    stage = Stage("SGD", GapAware())
    stage.optimizer.param_groups[0]["momentum"] = 0.0
    cases.refuses(stage.step, ValueError, "momentum 0: GapAware", stage.master.values())
    narrow = cases.made("SGD", cases.make_params(cases.BF16))
    bind = partial(narrow.bind, None, cases.buffers_for(narrow), DelayCompensation(1))
    cases.refuses(bind, TypeError, "float32 or float64")


@pytest.mark.parametrize(
    ("kind", "name", "bad"),
    [
        (DelayCompensation, "strength", [-1.0, math.nan, math.inf, "1", None]),
        (GapAware, "decay", [-0.1, 1.0, math.nan, "1"]),
        (AdaptiveBraking, "strength", [-1.0, math.nan, "1"]),
    ],
)
def test_corrections_are_values_of_good_numbers(kind: Any, name: str, bad: list[Any]) -> None:
    assert kind(0.5) == kind(0.5) != kind(0.25)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(0.5), name, 0.25)
    for value in bad:
        with pytest.raises((ValueError, TypeError), match=name):
            kind(value)
