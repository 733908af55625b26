"""Tests launches and caches of a step: inner, because only their cost is visible from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.optim_cases import every_adam, every_rival, give_gradients, made, make_params, trained

from spectrain_ext import _C


def launches_of(name: str, groups: list[dict[str, Any]], late: int | None = None) -> list[Any]:
    """Return the launches of a step, which writes all parameters."""
    optimizer = made(name, groups)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for none in ([], [] if late is None else [late], []):
        give_gradients(params, none=none)
        optimizer.step()
    return list(next(iter(optimizer._launches._known.values())).launches)


@every_adam
def test_groups_have_their_own_options_in_one_launch(name: str) -> None:
    params = [p for p in make_params() if p.numel()]
    groups = [
        {"params": params[:2], "lr": 0.3, "betas": (0.5, 0.9)},
        {"params": params[2:4], "weight_decay": 0.1, "eps": 1e-4},
        {"params": params[4:], "maximize": True},
    ]
    (launch,) = launches_of(name, groups, late=1)
    assert len(launch.cohorts) == 4  # parameter 1 has made one step less
    assert launch.native.last_launch()[0] == 1


@every_rival
def test_steps_and_predictions_in_place_reuse_their_launches(name: str) -> None:
    """Each made the other's anew, nine times as slow for 50 small parameters."""
    params, optimizer = trained(name)
    seen = []
    for _ in range(4):
        with optimizer.predicted(1):
            pass
        give_gradients(params)
        optimizer.step()
        seen.append(list(optimizer._launches._known.values()))
    assert all(a is b for a, b in zip(seen[2], seen[3], strict=True))


@pytest.mark.parametrize(
    ("now", "seen", "expected"),
    [
        ([{"lr": 0.1, "n": 3, "s": "x", "b": True}], ((0.1, 3, "x", True),), True),
        ([{"lr": 0.1}], ((0.2,),), False),
        ([{"lr": 1}], ((1.0,),), False),
        ([{"b": 1}], ((True,),), False),
        ([{"lr": 0.1, "more": 1}], ((0.1,),), False),
        ([{"betas": [0.1, 0.2]}], (((0.1, 0.2),),), True),
        ([{"betas": [0.1, 0.3]}], (((0.1, 0.2),),), False),
        ({"a": 1, "other": 2}, {"a": 1}, True),
        ({"other": 2}, {"a": None}, True),
        ({"a": 2}, {"a": None}, False),
        (None, {"a": None}, False),
    ],
)
def test_same_compares_with_what_was_noted(now: object, seen: object, expected: bool) -> None:
    assert _C.same(now, seen) is expected


def test_same_knows_an_object_by_its_identity() -> None:
    tensor = torch.ones(2)
    assert _C.same([tensor], (tensor,))
    assert not _C.same([tensor.clone()], (tensor,))
