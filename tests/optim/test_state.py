"""Tests the state of Adam, AdamW and NAdam: checkpoints both ways with torch, and bound state."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    assert_bits,
    assert_same,
    assert_same_state,
    bits,
    every_adam,
    give_gradients,
    make_params,
    states,
    twins,
)
from torch import Tensor, nn

import spectrain_ext as st


def saved_and_loaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(
    name: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[list[nn.Parameter], Any]:
    params = make_params(dtype)
    optimizer = getattr(st.optim, name)(params, **{"lr": 0.02, **options})
    for step in range(3):
        give_gradients(params, none=[2] if step == 0 else [])
        optimizer.step()
    return params, optimizer


@every_adam
@pytest.mark.parametrize("through_a_file", (False, True))
@pytest.mark.parametrize("fused", (None, True), ids=("plain", "fused"))
@pytest.mark.parametrize("direction", ("from torch", "to torch", "same"))
def test_checkpoints_load_in_both_directions(
    name: str, direction: str, fused: bool | None, through_a_file: bool
) -> None:
    flag = {} if name == "NAdam" or fused is None else {"fused": fused}
    modules = {"from torch": (torch.optim, st.optim), "to torch": (st.optim, torch.optim)}
    first_of, second_of = modules.get(direction, (st.optim, st.optim))
    # torch casts a loaded mu_product to the dtype of its parameter.
    ours = make_params(torch.float32 if name == "NAdam" else torch.float64)
    first = getattr(first_of, name)(ours, lr=0.02, weight_decay=0.1, **flag)
    for step in range(4):
        give_gradients(ours, none=[1] if step < 2 else [4])
        first.step()
    theirs = twins(ours)
    second = getattr(second_of, name)(theirs, lr=9.0)
    state_dict = first.state_dict()
    # torch does not copy the step counts of a state_dict that it loads.
    saved = saved_and_loaded(state_dict) if through_a_file else copy.deepcopy(state_dict)
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == 0.02
    assert_same_state(states(second, theirs), states(first, ours))
    for _ in range(4):
        give_gradients(ours, theirs)
        first.step()
        second.step()
    assert_same(ours, theirs)
    assert_same_state(states(second, theirs), states(first, ours))


@every_adam
def test_loaded_state_is_independent_of_the_checkpoint(name: str) -> None:
    params, optimizer = trained(name)
    state_dict = optimizer.state_dict()
    for entry in state_dict["state"].values():
        assert entry["step"].untyped_storage().nbytes() == entry["step"].nbytes
    other_params = twins(params)
    other = getattr(st.optim, name)(other_params)
    other.load_state_dict(state_dict)
    kept = copy.deepcopy(states(optimizer, params))
    give_gradients(other_params)
    other.step()
    assert_same_state(states(optimizer, params), kept)
    assert other.state[other_params[0]]["step"] == kept[0]["step"] + 1


@every_adam
@pytest.mark.parametrize("as_what", ("number", "wide", "one element"))
def test_counts_of_other_kinds_are_loaded(name: str, as_what: str) -> None:
    params, optimizer = trained(name)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        step = entry["step"].item()
        entry["step"] = {
            "number": int(step),
            "wide": torch.tensor(step, dtype=torch.float64),
            "one element": torch.tensor([step]),
        }[as_what]
    copies = twins(params)
    copied = getattr(st.optim, name)(copies)
    copied.load_state_dict(saved)
    give_gradients(params, copies)
    optimizer.step()
    copied.step()
    assert_bits(copies, bits(params))
    assert_same_state(states(copied, copies), states(optimizer, params))


@every_adam
def test_state_made_before_the_first_step(name: str) -> None:
    """Some frameworks make the state in advance, with a count of 0."""
    params, theirs = make_params(), None
    optimizer = getattr(st.optim, name)(params, lr=0.1)
    theirs = twins(params)
    reference = getattr(torch.optim, name)(theirs, lr=0.1)
    for p in params:
        optimizer.state[p].update(
            step=torch.tensor(0.0),
            exp_avg=torch.zeros_like(p).detach(),
            exp_avg_sq=torch.zeros_like(p).detach(),
        )
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


@every_adam
def test_state_of_other_names_is_kept(name: str) -> None:
    params, optimizer = trained(name)
    saved = optimizer.state_dict()
    saved["state"][0]["note"] = 7
    optimizer.load_state_dict(saved)
    give_gradients(params)
    optimizer.step()
    assert optimizer.state[params[0]]["note"] == 7
    assert optimizer.state_dict()["state"][0]["note"] == 7


@every_adam
def test_moments_of_two_dtypes_become_one(name: str) -> None:
    params, optimizer = trained(name, torch.bfloat16)
    copied = copy.deepcopy(optimizer)
    copies = copied.param_groups[0]["params"]
    for p in copies:
        copied.state[p]["exp_avg_sq"] = copied.state[p]["exp_avg_sq"].float()
    give_gradients(params, copies)
    optimizer.step()
    copied.step()
    assert_bits(copies, bits(params))
    assert_same_state(states(copied, copies), states(optimizer, params))


@pytest.mark.parametrize("asked", (None, torch.float32), ids=str)
@pytest.mark.parametrize("how", ("state_dict", "deepcopy"))
@every_adam
def test_float32_moments_stay_float32(name: str, how: str, asked: torch.dtype | None) -> None:
    params, optimizer = trained(name, torch.bfloat16, momentum_dtype=torch.float32)
    if how == "state_dict":
        copies = twins(params)
        copied = getattr(st.optim, name)(copies, momentum_dtype=asked)
        copied.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    else:
        copied = copy.deepcopy(optimizer)
        copies = copied.param_groups[0]["params"]
    give_gradients(params, copies)
    optimizer.step()
    copied.step()
    assert_bits(copies, bits(params))
    for entry in states(copied, copies):
        assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.float32
    assert_same_state(states(copied, copies), states(optimizer, params))


@every_adam
@pytest.mark.parametrize(
    "wrong", ("shape", "groups", "lr", "amsgrad", "type", "count", "half", "only others")
)
def test_a_state_dict_that_does_not_fit_changes_nothing(name: str, wrong: str) -> None:
    params, optimizer = trained(name)
    saved = copy.deepcopy(optimizer.state_dict())
    entry = saved["state"][5]
    if wrong == "shape":
        entry["exp_avg_sq"] = torch.zeros(3)
    elif wrong == "groups":
        saved["param_groups"].append(saved["param_groups"][0])
    elif wrong == "lr":
        saved["param_groups"][0]["lr"] = float("nan")
    elif wrong == "amsgrad":
        saved["param_groups"][0]["capturable"] = True
    elif wrong == "type":
        entry["exp_avg"] = "moment"
    elif wrong == "count":
        entry["step"] = "three"
    elif wrong == "half":
        del entry["exp_avg_sq"]
    else:
        saved["state"][5] = {"momentum_buffer": torch.zeros(1031)}
    saved["state"][1]["exp_avg"] = torch.tensor(7.0)
    kept, group = copy.deepcopy(states(optimizer, params)), dict(optimizer.param_groups[0])
    with pytest.raises((ValueError, TypeError)):
        optimizer.load_state_dict(saved)
    assert_same_state(states(optimizer, params), kept)
    assert optimizer.param_groups[0] == group
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def bound(name: str, dtype: torch.dtype = torch.float64) -> tuple[list[nn.Parameter], Any, Any]:
    params, optimizer = trained(name, dtype)
    buffers = {
        key: {p: torch.full_like(p, float("nan")).detach() for p in params}
        for key in optimizer.buffer_keys
    }
    return params, optimizer, buffers


@every_adam
def test_binding_takes_state_along_and_unbinding_gives_it_back(name: str) -> None:
    params, optimizer, buffers = bound(name)
    copies = twins(params)
    reference = getattr(st.optim, name)(copies)
    reference.load_state_dict(optimizer.state_dict())
    kept = copy.deepcopy(states(optimizer, params))
    optimizer.bind(None, buffers)
    assert_same_state(states(optimizer, params), kept)
    saved = optimizer.state_dict()
    for p, entry in zip(params, saved["state"].values(), strict=True):
        for key in buffers:
            assert optimizer.state[p][key] is buffers[key][p]
            assert entry[key].data_ptr() != buffers[key][p].data_ptr() or p.numel() == 0
    give_gradients(params, copies)
    optimizer.step()
    reference.step()
    optimizer.load_state_dict(saved)
    reference.load_state_dict(saved)
    assert optimizer.state[params[0]]["exp_avg"] is buffers["exp_avg"][params[0]]
    for _ in range(2):
        give_gradients(params, copies)
        optimizer.step()
        reference.step()
    optimizer.unbind()
    for views in buffers.values():
        for view in views.values():
            view.fill_(float("nan"))
    assert_bits(params, bits(copies))
    assert_same_state(states(optimizer, params), states(reference, copies))
    give_gradients(params, copies)
    optimizer.step()
    reference.step()
    assert_bits(params, bits(copies))


@every_adam
@pytest.mark.parametrize("how", ("deleted", "cleared", "replaced"))
def test_state_replaced_while_bound_is_adopted(name: str, how: str) -> None:
    params, optimizer, buffers = bound(name)
    optimizer.bind(None, buffers)
    outs = {p: torch.empty_like(p).detach() for p in params}
    first = params[0]
    if how == "deleted":
        del optimizer.state[first]
    elif how == "cleared":
        optimizer.state[first].clear()
    else:
        optimizer.state[first]["exp_avg"] = torch.zeros_like(first).detach()
    optimizer.write_prediction(outs, 2)
    assert torch.equal(outs[first], first.detach())
    assert not torch.equal(outs[params[5]], params[5].detach())
    assert (buffers["exp_avg"][first] == 0).all()
    give_gradients(params)
    optimizer.step()
    assert optimizer.state[first]["exp_avg"] is buffers["exp_avg"][first]
    assert optimizer.state[first]["step"] == (4.0 if how == "replaced" else 1.0)


@every_adam
def test_misuse_of_the_binding_raises_and_changes_nothing(name: str) -> None:
    params, optimizer, buffers = bound(name, torch.bfloat16)
    last = params[5]
    wider = {p: v.float() for p, v in buffers["exp_avg_sq"].items()}
    one: dict[Tensor, Tensor] = buffers["exp_avg"]
    bad: list[tuple[Any, str]] = [
        (one, "exp_avg and exp_avg_sq"),
        ({"exp_avg": one}, "exp_avg and exp_avg_sq"),
        ({**buffers, "exp_avg_sq": wider}, "exp_avg_sq of parameter 0"),
        ({**buffers, "exp_avg_sq": {}}, "exp_avg_sq has no tensor for parameter 0"),
        (
            {**buffers, "exp_avg_sq": {**buffers["exp_avg_sq"], last: torch.zeros(1031)}},
            "exp_avg_sq of parameter 5",
        ),
    ]
    for given, message in bad:
        with pytest.raises(ValueError, match=message):
            optimizer.bind(None, given)
    assert all(view.isnan().all() for views in buffers.values() for view in views.values())
    optimizer.bind(None, buffers)
    with pytest.raises(RuntimeError, match="already"):
        optimizer.bind(None, buffers)
    with pytest.raises(RuntimeError, match="bound"):
        optimizer.predict_(1)
