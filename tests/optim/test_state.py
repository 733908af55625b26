"""Tests what state_dicts and a caller may contain: dtypes, layouts, kinds of counts, other keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    BF16,
    F16,
    F32,
    F64,
    assert_bits,
    assert_same,
    bits,
    every_adam,
    every_rival,
    give_gradients,
    made,
    make_params,
    pair_of,
    state_of,
    trained,
    twins,
)


def momenta(optimizer: Any, params: Any) -> list[Any]:
    return [optimizer.state.get(p, {}).get("momentum_buffer") for p in params]


def step_alike(name: str, first: Any, second: Any) -> None:
    """Assert that two optimizers, each with its parameters, make the same step."""
    give_gradients(first[0], second[0])
    for _, optimizer in (first, second):
        optimizer.step()
    assert_bits(second[0], first[0])
    found, expected = (state_of(optimizer, params) for params, optimizer in (second, first))
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert_bits((a[key] for key in b), b.values())


def test_loading_over_existing_state_and_missing_state() -> None:
    ours, optimizer = trained()
    optimizer.load_state_dict(made("SGD", make_params(), lr=0.5).state_dict())
    assert momenta(optimizer, ours) == [None] * len(ours)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("saved", "dtype", "asked", "loaded"),
    [
        (BF16, BF16, F32, F32),
        (F32, BF16, BF16, BF16),
        (F32, F16, None, F32),
        (F32, BF16, F32, F32),
        (F32, F64, None, F64),
        (F64, BF16, None, BF16),
        (F16, BF16, None, BF16),
    ],
    ids=str,
)
def test_loading_casts_what_must_be_cast(
    saved: torch.dtype, dtype: torch.dtype, asked: torch.dtype | None, loaded: torch.dtype
) -> None:
    _, source = trained(dtype=saved)
    params = make_params(dtype)
    optimizer = made("SGD", params, momentum_dtype=asked)
    optimizer.load_state_dict(source.state_dict())
    assert {v.dtype for v in momenta(optimizer, params)} == {loaded}
    assert {optimizer.momentum_dtype(p) for p in params} == {loaded}
    give_gradients(params)
    optimizer.step()
    assert {v.dtype for v in momenta(optimizer, params)} == {loaded}


def test_load_state_dict_hooks_run() -> None:
    _, optimizer = trained()
    params = make_params()
    other, seen = made("SGD", params), list[Any]()

    def pre(opt: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state_dict)
        state["state"][0]["momentum_buffer"].fill_(5.0)
        return state

    other.register_load_state_dict_pre_hook(pre)
    other.register_load_state_dict_post_hook(lambda opt: seen.append(momenta(opt, params)[0]))
    for _ in range(2):
        other.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2
    assert (seen[0] == 5.0).all()


@every_adam
@pytest.mark.parametrize("kind", ["number", "wide", "one element"])
def test_counts_of_other_kinds_are_loaded(name: str, kind: str) -> None:
    params, optimizer = trained(name)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        step = entry["step"].item()
        entry["step"] = {
            "number": int(step),
            "wide": torch.tensor(step, dtype=F64),
            "one element": torch.tensor([step]),
        }[kind]
    copies = twins(params)
    copied = made(name, copies)
    copied.load_state_dict(saved)
    step_alike(name, (params, optimizer), (copies, copied))


@every_adam
def test_state_made_before_the_first_step(name: str) -> None:
    """Some frameworks make the state in advance, with a count of 0."""
    params = make_params()
    theirs, optimizer, reference = pair_of(name, params)
    for p in params:
        state = {"step": torch.tensor(0.0)}
        state |= {key: torch.zeros_like(p).detach() for key in optimizer.buffer_keys}
        optimizer.state[p].update(state)
        if name == "NAdam":
            optimizer.state[p]["mu_product"] = torch.tensor(1.0)
    kept = bits(params)
    with optimizer.predicted(3):
        assert_bits(params, kept)
    for _ in range(3):
        give_gradients(params, theirs)
        optimizer.step()
        reference.step()
    assert_same(params, theirs)


@every_rival
def test_state_of_other_names_is_kept(name: str) -> None:
    """In its own dtype, such as the average of a correction that is not in use."""
    params, optimizer = trained(name, BF16)
    saved = optimizer.state_dict()
    saved["state"][0].update(note=7, average=torch.ones(2))
    optimizer.load_state_dict(saved)
    give_gradients(params)
    optimizer.step()
    for entry in (optimizer.state[params[0]], optimizer.state_dict()["state"][0]):
        assert entry["note"] == 7
        assert torch.equal(entry["average"], torch.ones(2))


@every_adam
def test_moments_of_two_dtypes_become_one(name: str) -> None:
    params, optimizer = trained(name, BF16)
    copied, copies = copy.deepcopy((optimizer, params))
    for p in copies:
        copied.state[p]["exp_avg_sq"] = copied.state[p]["exp_avg_sq"].float()
    step_alike(name, (params, optimizer), (copies, copied))


def test_the_extras_of_sgd_are_keys_of_the_groups_only_where_asked_for() -> None:
    reference = torch.optim.SGD(make_params(), lr=0.1, momentum=0.9)
    plain, extra = made("SGD", make_params()), made("SGD", make_params(), smoothed=True)
    assert "smoothed" not in plain.param_groups[0]
    extra.load_state_dict(reference.state_dict())  # which has no such key
    extra.add_param_group({"params": make_params()})
    for each in (extra, copy.deepcopy(extra)):
        assert [group["smoothed"] for group in each.param_groups] == [True, True]
        assert each.param_groups[0]["momentum"] == 0.9
    reference.add_param_group({"params": make_params()})
    reference.load_state_dict(extra.state_dict())
