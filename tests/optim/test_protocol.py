"""Tests optim.SGD as a torch.optim.Optimizer: schedulers, hooks, closures, errors."""

from __future__ import annotations

import warnings
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
from torch import Tensor, nn

import spectrain_ext as st


def test_it_is_a_torch_optimizer_with_the_same_groups() -> None:
    params = make_params()
    optimizer = st.optim.SGD(params, lr=0.1)
    reference = torch.optim.SGD(twins(params), lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == reference.defaults
    assert optimizer.state_dict() == reference.state_dict()
    assert optimizer.param_groups[0].keys() == reference.param_groups[0].keys()
    assert repr(optimizer) == repr(reference)


@pytest.mark.parametrize("flag", ({"foreach": True}, {"fused": True}, {"foreach": False}))
def test_implementation_flags_have_no_effect(flag: dict[str, bool]) -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9, **flag)
    reference = st.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_bits(ours, bits(theirs))


def test_a_gradient_scaler_skips_the_step_on_overflow() -> None:
    # Like torch's fused optimizers this one skips inside of step().
    p = nn.Parameter(torch.ones(4))
    optimizer = st.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((p * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_bits([p], [torch.ones(4)])
    optimizer.zero_grad()
    scaler.scale((p * 2).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.8))


def test_a_step_divides_by_the_scale_and_leaves_gradients_scaled() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9, weight_decay=0.1)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.1)
    scale = torch.tensor(3.0)
    for step in range(4):
        give_gradients(ours, theirs)
        scaled = [p.grad * scale for p in ours if p.grad is not None]
        for p, g in zip((p for p in ours if p.grad is not None), scaled, strict=True):
            p.grad = g
        optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(float(step == 2))
        before = bits(ours)
        optimizer.step()
        if step == 2:
            assert_bits(ours, before)
        else:
            reference.step()
        for p, g in zip((p for p in ours if p.grad is not None), scaled, strict=True):
            assert p.grad is g and torch.equal(p.grad, g)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach(), q.detach())


def test_a_skipped_first_step_leaves_no_state() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = st.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.5)
    for found in (1.0, 0.0):
        p.grad = torch.ones(4)
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        assert bool(optimizer.state[p]) is (found == 0.0)
    # the first gradient enters undampened
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.ones(4))


@pytest.mark.parametrize("as_tensor", (False, True))
@pytest.mark.parametrize("kind", ("step", "one_cycle", "cyclic", "lambda"))
def test_schedulers(kind: str, as_tensor: bool) -> None:
    ours = make_params()
    theirs = twins(ours)

    def lr() -> Any:
        return torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1

    optimizer = st.optim.SGD(ours, lr=lr(), momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=lr(), momentum=0.9)

    def scheduler(opt: torch.optim.Optimizer) -> Any:
        from torch.optim import lr_scheduler as s

        if kind == "step":
            return s.StepLR(opt, step_size=3, gamma=0.5)
        if kind == "one_cycle":
            return s.OneCycleLR(opt, max_lr=0.2, total_steps=15)
        if kind == "cyclic":
            return s.CyclicLR(opt, base_lr=0.01, max_lr=0.2, step_size_up=4)
        return s.LambdaLR(opt, lambda epoch: 0.9**epoch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [scheduler(optimizer), scheduler(reference)]
        for _ in range(12):
            give_gradients(ours, theirs)
            optimizer.step()
            reference.step()
            for schedule in schedules:
                schedule.step()
            assert optimizer.param_groups[0]["momentum"] == reference.param_groups[0]["momentum"]
    if kind in ("one_cycle", "cyclic"):
        assert optimizer.param_groups[0]["momentum"] != 0.9
    assert_same(ours, theirs)


def test_momentum_switched_on_and_off_and_on_again() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1)
    reference = torch.optim.SGD(theirs, lr=0.1)
    for momentum in (0.0, 0.9, 0.9, 0.0, 0.0, 0.5, 0.5):
        optimizer.param_groups[0]["momentum"] = reference.param_groups[0]["momentum"] = momentum
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same(momenta(optimizer, ours), momenta(reference, theirs))


def test_step_hooks_run_around_the_step_and_can_clip() -> None:
    params = [nn.Parameter(torch.zeros(4))]
    optimizer = st.optim.SGD(params, lr=1.0, momentum=0.9)
    order: list[str] = []

    def clip(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        order.append("pre")
        nn.utils.clip_grad_norm_(params, 1.0)

    optimizer.register_step_pre_hook(clip)
    handle = optimizer.register_step_post_hook(lambda *_: order.append("post"))
    params[0].grad = torch.full((4,), 50.0)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((4,), -0.5), rtol=1e-5, atol=0)
    handle.remove()
    optimizer.step()
    assert order == ["pre", "post", "pre"]


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = st.optim.SGD([p], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 3.0
    assert_bits([p], [torch.zeros(3)])


def test_add_param_group_after_some_steps() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours[:2], lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs[:2], lr=0.1, momentum=0.9)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": ours[2:], "lr": 0.01})
            reference.add_param_group({"params": theirs[2:], "lr": 0.01})
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_named_parameters() -> None:
    model = nn.Linear(3, 2)
    optimizer = st.optim.SGD(model.named_parameters(), lr=0.1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_backward_after_an_in_between_step_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    early = model(torch.randn(3, 4)).sum()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_only_parameters_with_a_gradient_count_as_modified() -> None:
    params, optimizer = trained()
    give_gradients(params, none=[1])
    versions = [p._version for p in params]
    optimizer.step()
    changed = [p._version > before for p, before in zip(params, versions, strict=True)]
    assert changed == [True, False, True, True, True, True]


@pytest.mark.parametrize(
    "options",
    (
        {"lr": -0.1},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"lr": torch.tensor([0.1, 0.2])},
        {"momentum": -0.5},
        {"momentum": float("nan")},
        {"weight_decay": -1.0},
        {"weight_decay": float("nan")},
        {"dampening": float("nan")},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        {"differentiable": True},
    ),
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        st.optim.SGD(make_params(), **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("dtype", "momentum_dtype"),
    (
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.complex64, None),
    ),
    ids=str,
)
def test_bad_dtypes(dtype: torch.dtype, momentum_dtype: torch.dtype | None) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype))]
    if dtype != torch.float32:
        momentum_ok = momentum_dtype in (None, torch.float32)
        bad = 1 if momentum_ok else 0
    else:
        bad = 0
    with pytest.raises(TypeError, match=f"parameter {bad} of group 0"):
        st.optim.SGD(params, lr=0.1, momentum=0.9, momentum_dtype=momentum_dtype)


def test_duplicate_parameters() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="parameter 2 of group 0 is parameter 0"):
            st.optim.SGD([p, q, p], lr=0.1)
    with pytest.raises(ValueError):
        st.optim.SGD([{"params": [p]}, {"params": [q, p]}], lr=0.1)


def test_a_bad_group_is_not_added() -> None:
    params, optimizer = trained()
    new = nn.Parameter(torch.ones(2).double())
    for bad in ({"params": [new], "lr": -1.0}, {"params": [new], "differentiable": True}):
        with pytest.raises(ValueError, match="group 1"):
            optimizer.add_param_group(bad)
    with pytest.raises(TypeError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.cfloat))]})
    assert len(optimizer.param_groups) == 1
    give_gradients(params)
    optimizer.step()


@pytest.mark.parametrize(
    ("key", "value"),
    (
        ("lr", -0.1),
        ("lr", float("nan")),
        ("lr", torch.ones(2)),
        ("momentum", -1.0),
        ("weight_decay", float("nan")),
        ("dampening", float("inf")),
        ("nesterov", True),
        ("differentiable", True),
        ("lr", "fast"),
    ),
)
def test_numbers_that_go_bad_later_change_nothing(key: str, value: Any) -> None:
    params = make_params()
    groups = [{"params": params[:3]}, {"params": params[3:], "dampening": 0.5}]
    optimizer = st.optim.SGD(groups, lr=0.1, momentum=0.9)
    give_gradients(params)
    optimizer.step()
    optimizer.param_groups[1][key] = value
    kept, buffers = bits(params), bits(momenta(optimizer, params))
    give_gradients(params)
    with pytest.raises((ValueError, TypeError), match="group 1"):
        optimizer.step()
    assert_bits(params, kept)
    assert_bits(momenta(optimizer, params), buffers)
