"""Tests optim.SGD's state: state_dict in both directions with torch, deepcopy, pickle."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    assert_bits,
    assert_same,
    bits,
    give_gradients,
    make_params,
    momenta,
    trained,
    twins,
)
from torch import nn

import spectrain_ext as st


def saved_and_loaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("direction", ("from torch", "to torch", "same"))
def test_checkpoints_load_in_both_directions(direction: str) -> None:
    ours, theirs = make_params(), make_params()
    first_class = torch.optim.SGD if direction == "from torch" else st.optim.SGD
    second_class = torch.optim.SGD if direction == "to torch" else st.optim.SGD
    first = first_class(ours, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        give_gradients(ours, none=[1])
        first.step()
    theirs = twins(ours)
    second = second_class(theirs, lr=9.0, momentum=0.1)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    assert second.param_groups[0]["lr"] == 0.1
    for _ in range(3):
        give_gradients(ours, theirs)
        first.step()
        second.step()
    assert_same(ours, theirs)
    assert_same(momenta(first, ours), momenta(second, theirs))


def test_loading_over_existing_state_and_missing_state() -> None:
    ours, optimizer = trained()
    fresh = st.optim.SGD(make_params(), lr=0.5, momentum=0.9).state_dict()
    optimizer.load_state_dict(fresh)
    assert momenta(optimizer, ours) == [None] * len(ours)
    theirs = twins(ours)
    reference = torch.optim.SGD(theirs, lr=0.5, momentum=0.9)
    for _ in range(2):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_loaded_momentum_is_independent_of_the_checkpoint() -> None:
    params, optimizer = trained()
    state_dict = optimizer.state_dict()
    other_params = twins(params)
    other = st.optim.SGD(other_params, lr=0.1, momentum=0.9)
    other.load_state_dict(state_dict)
    kept = bits(momenta(optimizer, params))
    give_gradients(other_params)
    other.step()
    assert_bits(momenta(optimizer, params), kept)


@pytest.mark.parametrize("how", ("state_dict", "deepcopy", "pickle"))
@pytest.mark.parametrize("asked", (None, torch.float32))
def test_float32_momentum_stays_float32(how: str, asked: torch.dtype | None) -> None:
    params, optimizer = trained(torch.bfloat16, momentum_dtype=torch.float32)
    kept = bits(momenta(optimizer, params))
    if how == "state_dict":
        copied = st.optim.SGD(make_params(torch.bfloat16), momentum=0.9, momentum_dtype=asked)
        copied.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    elif how == "deepcopy":
        copied = copy.deepcopy(optimizer)
    else:
        copied = pickle.loads(pickle.dumps(optimizer))
    copies = copied.param_groups[0]["params"]
    assert {b.dtype for b in momenta(copied, copies)} == {torch.float32}
    assert_bits(momenta(copied, copies), kept)
    give_gradients(params, copies) if how != "state_dict" else give_gradients(copies)
    optimizer.step()
    copied.step()
    assert {b.dtype for b in momenta(copied, copies)} == {torch.float32}
    if how != "state_dict":
        assert_bits(copies, bits(params))


def test_loading_casts_what_must_be_cast() -> None:
    def loaded(saved: torch.dtype, dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
        state_dict = trained(saved)[1].state_dict()
        params = make_params(dtype)
        optimizer = st.optim.SGD(params, momentum=0.9, momentum_dtype=asked)
        optimizer.load_state_dict(state_dict)
        (found,) = {b.dtype for b in momenta(optimizer, params)}
        give_gradients(params)
        optimizer.step()
        return found

    assert loaded(torch.bfloat16, torch.bfloat16, torch.float32) == torch.float32
    assert loaded(torch.float32, torch.bfloat16, torch.bfloat16) == torch.bfloat16
    assert loaded(torch.float32, torch.float16, None) == torch.float32
    assert loaded(torch.float32, torch.float64, None) == torch.float64
    assert loaded(torch.float64, torch.bfloat16, None) == torch.bfloat16
    assert loaded(torch.float16, torch.bfloat16, None) == torch.bfloat16


def test_loaded_momentum_takes_the_layout_of_the_parameter() -> None:
    weight = torch.randn(4, 3, 5, 5).double()
    plain = nn.Parameter(weight.clone())
    nhwc = nn.Parameter(weight.clone(memory_format=torch.channels_last))
    first = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    plain.grad = torch.randn_like(plain)
    first.step()
    second = st.optim.SGD([nhwc], lr=0.1, momentum=0.9)
    with torch.no_grad():
        nhwc.copy_(plain)
    second.load_state_dict(first.state_dict())
    assert nhwc.is_contiguous(memory_format=torch.channels_last)
    plain.grad = torch.randn_like(plain)
    nhwc.grad = plain.grad.clone(memory_format=torch.channels_last)
    first.step()
    second.step()
    assert_same([nhwc], [plain])


def test_load_state_dict_hooks_run() -> None:
    _, optimizer = trained()
    other = st.optim.SGD(make_params(), lr=0.1, momentum=0.9)
    seen: list[Any] = []

    def pre(opt: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state_dict)
        state["state"][0]["momentum_buffer"].fill_(5.0)
        return state

    other.register_load_state_dict_pre_hook(pre)
    other.register_load_state_dict_post_hook(
        lambda opt: seen.append(opt.state[opt.param_groups[0]["params"][0]]["momentum_buffer"])
    )
    for _ in range(2):
        other.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2
    assert (seen[0] == 5.0).all()


@pytest.mark.parametrize("wrong", ("shape", "groups", "lr", "differentiable", "type"))
def test_a_state_dict_that_does_not_fit_changes_nothing(wrong: str) -> None:
    params, optimizer = trained()
    state_dict = copy.deepcopy(optimizer.state_dict())
    if wrong == "shape":
        state_dict["state"][5]["momentum_buffer"] = torch.zeros(3)
    elif wrong == "groups":
        state_dict["param_groups"].append(state_dict["param_groups"][0])
    elif wrong == "lr":
        state_dict["param_groups"][0]["lr"] = float("nan")
    elif wrong == "differentiable":
        state_dict["param_groups"][0]["differentiable"] = True
    else:
        state_dict["state"][0]["momentum_buffer"] = "momentum"
    state_dict["state"][1]["momentum_buffer"] = torch.tensor(7.0)
    kept, groups = bits(momenta(optimizer, params)), copy.copy(optimizer.param_groups[0])
    with pytest.raises((ValueError, TypeError)):
        optimizer.load_state_dict(state_dict)
    assert_bits(momenta(optimizer, params), kept)
    assert optimizer.param_groups[0].items() == groups.items()
    assert not optimizer._optimizer_load_state_dict_pre_hooks


@pytest.mark.parametrize("how", (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))))
def test_copies_go_on_alike(how: Any) -> None:
    params, optimizer = trained()
    copied = how(optimizer)
    copies = copied.param_groups[0]["params"]
    for _ in range(3):
        give_gradients(params, copies)
        optimizer.step()
        copied.step()
    assert_bits(copies, bits(params))


def test_a_pickle_of_a_model_and_its_optimizer_stays_connected() -> None:
    model = nn.Linear(3, 2)
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    model_copy(torch.randn(4, 3)).sum().backward()
    kept = bits(model_copy.parameters())
    optimizer_copy.step()
    assert not torch.equal(model_copy.weight, kept[0])
