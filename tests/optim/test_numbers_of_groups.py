"""Tests which work a step caches, and when it must redo it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from spectrain_ext import _C
from spectrain_ext.optim import SGD, Adam


def made(kind=SGD, **options):
    p = nn.Parameter(torch.ones(3))
    return p, kind([p], **options)


def step(p, optimizer):
    before = p.detach().clone()
    p.grad = torch.ones_like(p)
    optimizer.step()
    return (before - p.detach())[0].item()


def test_numbers_are_read_again_once_a_group_has_changed():
    p, optimizer = made(lr=0.5)
    groups = optimizer.param_groups
    assert optimizer._parameters.numbers(groups) is optimizer._parameters.numbers(groups)
    assert step(p, optimizer) == 0.5
    optimizer.param_groups[0]["lr"] = 0.25
    assert step(p, optimizer) == 0.25
    optimizer.param_groups[0]["weight_decay"] = 1.0
    assert step(p, optimizer) == 0.25 * 1.25
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="parameter group 0: lr"):
        step(p, optimizer)
    with pytest.raises(ValueError, match="parameter group 0: lr"):
        step(p, optimizer)
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.0)
    assert step(p, optimizer) == 0.5


def test_numbers_that_change_in_place():
    rate = torch.tensor(0.5)
    p, optimizer = made(lr=rate)
    assert step(p, optimizer) == 0.5
    rate.fill_(0.25)
    assert step(p, optimizer) == 0.25
    optimizer.param_groups[0]["lr"] = 0.125
    assert step(p, optimizer) == 0.125
    optimizer.param_groups[0]["lr"] = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="lr must be a number or a CPU tensor with one element"):
        step(p, optimizer)

    p, optimizer = made(Adam, lr=0.5, betas=(0.0, 0.0), eps=0.0)
    betas = [0.0, 0.0]
    optimizer.param_groups[0]["betas"] = betas
    assert step(p, optimizer) == 0.5
    betas[0] = 0.5
    p.grad = -torch.ones(3)
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(before, p)  # m = 0.5*1 + 0.5*(-1)


def test_hooks_of_all_kinds_are_called():
    p, optimizer = made(lr=0.5)
    calls = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global")),
    ]
    step(p, optimizer)
    assert sorted(calls) == ["global", "post", "pre"]
    for handle in handles:
        handle.remove()
    step(p, optimizer)
    assert len(calls) == 3


def test_a_profiler_sees_the_step():
    p, optimizer = made(lr=0.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step(p, optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in found.key_averages()}


@pytest.mark.parametrize(
    ("now", "seen", "expected"),
    [
        ([{"lr": 0.1, "n": 3, "s": "x", "b": True}], ((0.1, 3, "x", True),), True),
        ([{"lr": 0.1 + 0.1}], ((0.2,),), True),
        ([{"lr": 0.1}], ((0.2,),), False),
        ([{"lr": 1}], ((1.0,),), False),
        ([{"b": 1}], ((True,),), False),
        ([{"lr": 0.1, "more": 1}], ((0.1,),), False),
        ([{"lr": 0.1}, {}], ((0.1,),), False),
        ([{"betas": [0.1, 0.2]}], (((0.1, 0.2),),), True),
        ([{"betas": [0.1, 0.3]}], (((0.1, 0.2),),), False),
        ({"a": 1, "other": 2}, {"a": 1}, True),
        ({"other": 2}, {"a": 1}, False),
        ({"other": 2}, {"a": None}, True),
        ({"a": 2}, {"a": None}, False),
        (None, {"a": None}, False),
        (3, (3,), False),
    ],
)
def test_same_compares_with_what_was_noted(now: object, seen: object, expected: bool) -> None:
    assert _C.same(now, seen) is expected


def test_same_knows_an_object_by_its_identity() -> None:
    tensor = torch.ones(2)
    assert _C.same([tensor], (tensor,))
    assert not _C.same([tensor.clone()], (tensor,))
