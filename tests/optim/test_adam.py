"""Tests optim.Adam, AdamW and NAdam against torch's for any input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    ADAM_CASES,
    adam_step,
    assert_bits,
    assert_same,
    assert_same_state,
    bits,
    every_adam,
    give_gradients,
    make_params,
    pair_of,
    states,
    twins,
)
from torch import nn

import spectrain_ext as st


def case_id(case: Any) -> str:
    return ",".join(map(str, case.values())) if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        *((*case, torch.float64) for case in ADAM_CASES),
        *((*case, torch.float32) for case in ADAM_CASES[::5]),
    ],
    ids=case_id,
)
def test_many_steps_match_torch(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = make_params(dtype)
    theirs, optimizer, reference = pair_of(name, ours, lr=0.02, foreach=False, **options)
    for step in range(20):
        # Parameter 5 gets its first gradient late, parameter 0 misses some.
        none = [5] if step < 4 else [0] if step % 3 == 0 else []
        give_gradients(ours, theirs, none=none)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same_state(states(optimizer, ours), states(reference, theirs))


@pytest.mark.parametrize(
    ("dtype", "momentum_dtype"),
    [(torch.bfloat16, None), (torch.float16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("name", "options"), ADAM_CASES[::3], ids=case_id)
def test_16_bit_steps_round_exact_ones_once(
    name: str, options: dict[str, Any], momentum_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    """The stored values are the float64 step from the stored values, to half a unit and a bit.

    torch's own 16-bit step rounds after every operation and satisfies no bound of this kind.
    """
    params = make_params(dtype)
    optimizer = getattr(st.optim, name)(params, lr=0.02, momentum_dtype=momentum_dtype, **options)
    group = optimizer.param_groups[0]
    for t in range(1, 11):
        give_gradients(params)
        exact = []
        for p in params:
            state = optimizer.state.get(p, {})
            m = state.get("exp_avg", torch.zeros_like(p)).detach()
            u = state.get("exp_avg_sq", torch.zeros_like(p)).detach()
            exact.append(adam_step(name, group, t, p.detach(), p.grad, m, u))
        optimizer.step()
        for p, expected in zip(params, exact, strict=True):
            state = optimizer.state[p]
            found = (p.detach(), state["exp_avg"], state["exp_avg_sq"])
            for value, wanted in zip(found, expected, strict=True):
                info = torch.finfo(value.dtype)
                # The arithmetic in between is float32's.
                torch.testing.assert_close(
                    value.double(),
                    wanted,
                    rtol=info.eps * 0.5 + 1e-5,
                    atol=info.tiny * info.eps + 1e-6 * group["lr"],
                )
            assert found[1].dtype == found[2].dtype == (momentum_dtype or dtype)


@every_adam
def test_groups_have_their_own_options_in_one_launch(name: str) -> None:
    ours = make_params()
    ours = [p for p in ours if p.numel()]
    theirs = twins(ours)

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": 0.3, "betas": (0.5, 0.9)},
            {"params": params[2:4], "weight_decay": 0.1, "eps": 1e-4},
            {"params": params[4:], "maximize": True},
        ]

    optimizer = getattr(st.optim, name)(groups(ours), lr=0.02)
    reference = getattr(torch.optim, name)(groups(theirs), lr=0.02)
    for step in range(10):
        give_gradients(ours, theirs, none=[1] if step == 4 else [])
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same_state(states(optimizer, ours), states(reference, theirs))
    (rows,) = next(iter(optimizer._launches._known.values())).launches
    assert len(rows.cohorts) == 4  # parameter 1 has made one step less
    assert rows.native.last_launch()[0] == 1


@every_adam
def test_steps_that_drift_apart_and_meet_again(name: str) -> None:
    ours = make_params()
    theirs, optimizer, reference = pair_of(name, ours, lr=0.02, weight_decay=0.01)
    for step in range(12):
        none = [step % 6, (step + 1) % 6]
        give_gradients(ours, theirs, none=none)
        optimizer.step()
        reference.step()
        assert_same(ours, theirs)
    assert_same_state(states(optimizer, ours), states(reference, theirs))


@every_adam
def test_no_gradient_no_change_and_no_state(name: str) -> None:
    params = make_params()
    optimizer = getattr(st.optim, name)(params)
    kept = bits(params)
    optimizer.step()
    assert_bits(params, kept)
    assert not optimizer.state


@every_adam
def test_state_is_as_torch_keeps_it(name: str) -> None:
    ours = make_params(torch.float32)
    theirs, optimizer, reference = pair_of(name, ours)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        assert list(optimizer.state[p]) == list(reference.state[q])
        step = optimizer.state[p]["step"]
        assert (step.item(), step.shape, step.dtype, step.device.type) == (
            3.0,
            (),
            torch.float32,
            "cpu",
        )
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][key].stride() == p.stride()


@every_adam
@pytest.mark.parametrize(
    "how", ("replaced", "in place", "number", "half gone", "deleted", "cleared", "rebound")
)
def test_state_that_the_caller_changes_is_used(name: str, how: str) -> None:
    ours = make_params()
    theirs, optimizer, reference = pair_of(name, ours, lr=0.02)
    for step in range(6):
        if step == 3:
            for p, opt in ((ours[3], optimizer), (theirs[3], reference)):
                state = opt.state[p]
                if how == "replaced":
                    state["step"] = torch.tensor(17.0)
                    state["exp_avg"] = torch.ones_like(p).detach()
                elif how == "in place":
                    state["step"].fill_(5.0)
                    state["exp_avg_sq"].mul_(2.0)
                elif how == "number":
                    state["step"] = torch.tensor(9.0) if opt is reference else 9
                elif how == "rebound":
                    state["exp_avg"].data = torch.ones_like(p).detach()
                elif how == "deleted":
                    del opt.state[p]
                elif how == "cleared":
                    state.clear()
                elif opt is optimizer:
                    del state["exp_avg"]
        give_gradients(ours, theirs)
        if step == 3 and how == "half gone":
            kept = bits(ours)
            with pytest.raises(ValueError, match=r"parameter 3 of group 0.*no exp_avg"):
                optimizer.step()
            assert_bits(ours, kept)
            return
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same_state(states(optimizer, ours), states(reference, theirs))


@every_adam
def test_parameters_that_move_between_steps(name: str) -> None:
    ours = make_params()
    theirs, optimizer, reference = pair_of(name, ours, lr=0.02)
    for step in range(6):
        if step in (2, 4):
            for p in ours:
                p.data = p.data.clone()
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


@every_adam
def test_a_module_that_changes_dtype_takes_its_state_along(name: str) -> None:
    model = nn.Linear(5, 3).to(torch.bfloat16)
    optimizer = getattr(st.optim, name)(model.parameters(), lr=0.1)
    for t, dtype in enumerate((torch.bfloat16, torch.float32, torch.float64, torch.bfloat16), 1):
        model.to(dtype)
        before = bits(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            assert (p < old).all()
            assert optimizer.state[p]["step"] == t
            assert optimizer.state[p]["exp_avg"].dtype in (dtype, torch.float32)


@every_adam
def test_add_param_group_after_some_steps(name: str) -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = getattr(st.optim, name)(ours[:2], lr=0.1)
    reference = getattr(torch.optim, name)(theirs[:2], lr=0.1)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": ours[2:], "lr": 0.01})
            reference.add_param_group({"params": theirs[2:], "lr": 0.01})
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same_state(states(optimizer, ours), states(reference, theirs))


def test_under_a_float64_default_scalars_are_float64_as_torchs() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        ours = make_params()
        theirs, optimizer, reference = pair_of("NAdam", ours)
        for _ in range(4):
            give_gradients(ours, theirs)
            optimizer.step()
            reference.step()
        assert_same_state(states(optimizer, ours), states(reference, theirs))
    finally:
        torch.set_default_dtype(torch.float32)


@every_adam
def test_the_count_is_the_hosts_whatever_the_default_device(name: str) -> None:
    ours = make_params()
    theirs, optimizer, reference = pair_of(name, ours)
    for none in ([], [1, 3], []):
        give_gradients(ours, theirs, none=none)
        with torch.device("meta"):
            optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same_state(states(optimizer, ours), states(reference, theirs))
