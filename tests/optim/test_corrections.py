"""Tests bound optimizers with corrections by stale weights: steps, state, errors."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from helpers.covering import Axes, Row
from helpers.optim_cases import (
    BF16,
    EVERY,
    F16,
    F32,
    F64,
    assert_bits,
    bits,
    buffers_for,
    flat_views,
    give_gradients,
    made,
    make_params,
    refuses,
)
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
every_name = pytest.mark.parametrize("name", NAMES)
every_correction = pytest.mark.parametrize("kind", CORRECTIONS)


class Stage:
    """An optimizer with a master, whose parameters are in a buffer with other weights."""

    def __init__(
        self, name: str, correction: Any, dtype: torch.dtype = F64, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.wide = F32 if dtype.itemsize == 2 else dtype
        self.params = make_params(dtype)
        self.optimizer = made(name, self.params, **{"weight_decay": 0.05, **options})
        self.master = flat_views(self.params, self.wide, filled=True)
        self.bind(correction)

    def bind(self, correction: Any) -> None:
        keys = (*self.optimizer.buffer_keys, *(correction.buffers if correction else ()))
        self.buffers = {key: flat_views(self.params, self.wide) for key in dict.fromkeys(keys)}
        self.optimizer.bind(self.master, self.buffers, correction)
        self.own = {p: p.detach() for p in self.params}
        self.optimizer.read_stale(self.own)

    def rebind(self, correction: Any) -> None:
        self.optimizer.unbind()
        self.bind(correction)

    @property
    def weights(self) -> list[Tensor]:
        return bits(self.master.values())

    def stale(self, by: float = 0.05) -> list[Tensor]:
        """Let the parameters have other weights than the true ones."""
        for p, w in self.master.items():
            p.detach().copy_(w + by * torch.randn_like(w))
        return bits(self.params)

    def step(self, none: tuple[int, ...] = ()) -> None:
        give_gradients(self.params, none=none)
        self.optimizer.step()

    def gaps(self) -> list[Any]:
        return [self.optimizer.state[p].get("gap_average") for p in self.params]

    def counts(self) -> list[int]:
        return [int(self.optimizer.state[p]["gap_step"]) for p in self.params]


CASES = Axes(
    {
        "kind": tuple(EVERY_CORRECTION),
        "name": NAMES,
        "dtype": (F64, F32),
        "maximize": (False, True),
        "weight_decay": (0.0, 0.05),
        "momentum": (0.9, 0.0),
        "scale": (None, 8.0),  # of the gradients
    },
    [
        {"momentum": [0.0], "name": NAMES[1:]},
        {"momentum": [0.0], "kind": ["gap", "braking"]},
        {"kind": ["braking"], "name": NAMES[1:]},
    ],
).covering()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_steps_are_the_definition(case: Row) -> None:
    """With predictions in the step and alone, other rates, and missing gradients."""
    name, kind, options = case["name"], case["kind"], {"maximize": case["maximize"]}
    options["weight_decay"] = case["weight_decay"]
    options |= {"momentum": case["momentum"]} if name == "SGD" else {}
    stage = Stage(name, EVERY_CORRECTION[kind], case["dtype"], **options)
    optimizer, law = stage.optimizer, 2.0 if case["momentum"] else 0.0
    theirs = [nn.Parameter(w.double()) for w in stage.weights]
    reference = getattr(torch.optim, name)(theirs, **{**EVERY[name], **options}, foreach=False)
    steps = Steps(reference, theirs, (kind, NUMBERS[kind]))
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    if case["dtype"] == F32 or name == "NAdam":  # torch keeps its product of mu in float32
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
        give_gradients(stage.params, none=(1, 5) if t in (0, 3) else ())
        for p, q in zip(stage.params, theirs, strict=True):
            q.grad = None if p.grad is None else p.grad.to(F64, copy=True)
            if p.grad is not None and case["scale"]:
                p.grad *= case["scale"]
        optimizer.grad_scale = None if case["scale"] is None else torch.tensor(case["scale"])
        optimizer.found_inf = None
        optimizer.step()
        steps.step([w.double() for w in old])
        close(stage.weights, theirs)
        if t % 2:  # as written in a separate pass
            written = bits(stage.params)
            optimizer.write_prediction(stage.own, law)
            assert_bits(stage.params, written)
    if kind == "gap":
        buffers = stage.buffers["gap_average"].values()
        assert all(a is buffer for a, buffer in zip(stage.gaps(), buffers, strict=True))
        close(stage.gaps(), [steps.squares[q][0] for q in theirs])
        assert stage.counts() == [steps.squares[q][1] for q in theirs]
        rates = steps.largest_lr.values()
        assert [optimizer.param_groups[0]["gap_rate"]] == list(rates)


@every_name
@every_correction
def test_no_gap_is_the_plain_step(name: str, kind: str) -> None:
    stage, plain = Stage(name, CORRECTIONS[kind]), Stage(name, None)
    for each in (stage, plain):
        torch.manual_seed(6)
        for _ in range(3):
            each.stale(by=0.0)
            each.step()
    assert_bits(stage.weights, plain.weights)


@every_name
@every_correction
def test_steps_go_on_from_saved_state(name: str, kind: str) -> None:
    """In another optimizer and in the same one bound again, bit for bit."""
    stage = Stage(name, CORRECTIONS[kind])
    for _ in range(3):
        stage.stale()
        stage.step()
    other = Stage(name, CORRECTIONS[kind])
    other.optimizer.load_state_dict(copy.deepcopy(stage.optimizer.state_dict()))
    for w, view in zip(stage.weights, other.master.values(), strict=True):
        view.copy_(w)
    for again in (False, True):
        if again:
            stage.rebind(CORRECTIONS[kind])
        for each in (stage, other):
            torch.manual_seed(2)
            for _ in range(2):
                each.stale()
                each.step()
        assert_bits(stage.weights, other.weights)
    keys = set(stage.optimizer.state_dict()["state"][0])
    assert ({"gap_average", "gap_step"} <= keys) is (kind == "gap")
    assert ("gap_average" in keys) is (kind == "gap")


@every_name
@every_correction
def test_a_correction_begins_and_ends_during_training(name: str, kind: str) -> None:
    """The optimizer's state continues, and the correction's too when it begins again."""
    stage, twin = Stage(name, None), Stage(name, None)
    for seed, (correction, by) in enumerate(((None, 0.0), (CORRECTIONS[kind], 0.0), (None, 0.1))):
        for each, own in ((stage, correction), (twin, None)):
            torch.manual_seed(seed)
            each.rebind(own)
            each.stale(by)
            each.step()
        assert_bits(stage.weights, twin.weights)
    if kind == "gap":
        assert stage.counts() == [1] * 6
        averages = bits(stage.gaps())
        stage.rebind(CORRECTIONS[kind])
        assert_bits(stage.gaps(), averages)
        copied = copy.deepcopy(stage.optimizer).state_dict()["state"]
        assert copied[0].keys() == stage.optimizer.state_dict()["state"][0].keys()


@every_name
@every_correction
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_narrow_weights_with_a_master(name: str, kind: str, dtype: torch.dtype) -> None:
    """Gradients are widened first, those of other layouts and negative views as well."""
    found = []
    for strange in (False, True):
        stage = Stage(name, CORRECTIONS[kind], dtype)
        for _ in range(2):
            stage.stale()
            give_gradients(stage.params)
            for p in stage.params if strange else ():
                p.grad = torch._neg_view(-p.grad)
            stage.optimizer.step()
        found.append(stage.weights)
    assert_bits(*found)
    assert {w.dtype for w in stage.weights} == {F32}
    assert kind != "gap" or {average.dtype for average in stage.gaps()} == {F32}


def test_second_order_predictions_have_the_corrected_gradient() -> None:
    stage, plain = Stage("SGD", DelayCompensation(0.3)), Stage("SGD", None)
    for _ in range(2):
        weights, stale = stage.weights, stage.stale()
        give_gradients(stage.params, plain.params)
        for p, w, s in zip(plain.params, weights, stale, strict=True):
            p.grad += 0.3 * p.grad**2 * (w - s)
        for each in (stage, plain):
            each.optimizer.write_with_next_step(each.own, st.laws.SecondOrder(2))
            each.optimizer.step()
    for a, b in zip(stage.params, plain.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_a_skipped_step_is_not_counted() -> None:
    stage = Stage("SGD", GapAware())
    stage.stale()
    stage.step()
    before = bits(stage.gaps())
    stage.stale()
    stage.optimizer.found_inf, stage.optimizer.grad_scale = torch.tensor(1.0), None
    stage.step()
    assert stage.counts() == [1] * 6
    assert_bits(stage.gaps(), before)


def test_a_loaded_group_may_lack_the_largest_rate() -> None:
    stage = Stage("SGD", GapAware())
    stage.step()
    saved = stage.optimizer.state_dict()
    del saved["param_groups"][0]["gap_rate"]
    stage.optimizer.load_state_dict(saved)
    stage.step()
    assert stage.optimizer.param_groups[0]["gap_rate"] == 0.1


def test_braking_has_gradients_of_another_layout_as_well() -> None:
    found = []
    for transposed in (False, True):
        p = nn.Parameter(torch.ones(3, 2))
        optimizer = st.optim.SGD([p], lr=0.1, momentum=0.9)
        optimizer.bind(None, buffers_for(optimizer), AdaptiveBraking(0.5))
        for step in range(3):
            grad = torch.arange(6.0).reshape(3, 2) - step
            p.grad = grad.T.contiguous().T if transposed else grad
            optimizer.step()
        found.append(p.detach().clone())
    assert torch.equal(*found)


def test_corrections_are_values() -> None:
    assert GapAware() == GapAware(0.999)
    assert len({DelayCompensation(1), DelayCompensation(1.0)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        GapAware().decay = 0.5


def test_what_cannot_be_corrected() -> None:
    params = make_params()
    optimizer = made("SGD", params)
    views = buffers_for(optimizer)
    refuses(partial(optimizer.bind, None, views, 0.3), TypeError, "correction: expected")
    refuses(partial(optimizer.bind, None, views, GapAware()), ValueError, "gap_average")
    give_gradients(params)
    optimizer.step()  # nothing has changed
    assert optimizer.state[params[0]].keys() == {"momentum_buffer"}
    with pytest.raises(ValueError, match="momentum 0: GapAware"):
        Stage("SGD", GapAware(), momentum=0.0)
    stage = Stage("SGD", GapAware())
    stage.optimizer.param_groups[0]["momentum"] = 0.0
    refuses(stage.step, ValueError, "momentum 0: GapAware", stage.master.values())
    narrow = made("SGD", make_params(BF16))
    bind = partial(narrow.bind, None, buffers_for(narrow), DelayCompensation(1))
    refuses(bind, TypeError, "float32 or float64")


@pytest.mark.parametrize(
    ("kind", "name", "bad"),
    [
        (DelayCompensation, "strength", [-1.0, math.nan, math.inf, "1", None]),
        (GapAware, "decay", [-0.1, 1.0, math.nan, "1"]),
        (AdaptiveBraking, "strength", [-1.0, math.nan, "1"]),
    ],
)
def test_bad_numbers(kind: Any, name: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises((ValueError, TypeError), match=name):
            kind(value)
