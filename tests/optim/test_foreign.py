"""Tests the adapter of users' optimizers: inner, because a pipeline has no other way to its turns.

`pipeline/test_foreign` has what such optimizers do in pipelines.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from helpers.foreign_optimizers import FOREIGN
from helpers.optim_cases import BF16, F16, F32, F64, made
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.optim.base import updater_of
from spectrain_ext.optim.foreign import Foreign


def params(dtype: torch.dtype = F32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((3, 2), (3,))]


def graded(held: list[nn.Parameter], value: float = 1.0) -> None:
    for p in held:
        p.grad = torch.full_like(p, value)


def bound(optimizer: Any, held: list[nn.Parameter], dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
    """Return an updater and the true weights, whose values differ from the parameters'."""
    master, found = {p: (p.detach() * 2).to(dtype) for p in held}, Foreign(optimizer)
    found.bind(master, {})
    return found, list(master.values())


@pytest.mark.parametrize("narrow", [BF16, F16])
def test_a_wider_master(narrow: torch.dtype) -> None:
    """Steps are those of wide parameters; state keeps its digits."""
    held, seen = params(narrow), list[Any]()
    optimizer = torch.optim.AdamW(held, lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend((p.dtype, None if p.grad is None else p.grad.dtype) for p in held)
    )
    updater, true = bound(optimizer, held, F32)
    alone = [nn.Parameter(w.clone()) for w in true]
    other = torch.optim.AdamW(alone, lr=0.1)
    graded(held[:1], 0.3)
    alone[0].grad = held[0].grad.float()
    updater.step()
    other.step()
    assert seen == [(F32, F32), (F32, None)]
    assert [p.dtype for p in held] == [narrow, narrow]
    assert all(p.grad is None for p in held)
    assert all(map(torch.equal, true, alone))

    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    entry = optimizer.state[held[0]]
    for key, value in saved["state"][0].items():
        assert entry[key].dtype == value.dtype == F32
        assert torch.equal(entry[key], value)
    updater.unbind()
    assert (entry["exp_avg"].dtype, entry["step"].dtype) == (narrow, F32)
    graded(held)
    optimizer.step()
    optimizer.load_state_dict(saved)  # and it is torch's own again
    assert optimizer.state[held[0]]["exp_avg"].dtype == narrow
    updater.bind({p: p.detach().float() for p in held}, {})
    assert optimizer.state[held[0]]["exp_avg"].dtype == F32


@pytest.mark.parametrize("module", [torch.optim, st.optim])
def test_the_owner_takes_turns_with_whoever_reads_or_loads_state(module: Any) -> None:
    held, turns = params(), list[int]()

    class Owner:
        def turn(self) -> AbstractContextManager[None]:
            turns.append(1)
            return torch.no_grad()

    owner = Owner()
    optimizer = module.SGD(held, lr=0.1, momentum=0.9)
    updater = updater_of(optimizer)
    updater.bind(None, {key: {p: torch.zeros_like(p) for p in held} for key in updater.buffer_keys})
    updater.order_by(owner.turn)
    graded(held)
    updater.step()
    saved = optimizer.state_dict()
    assert len(turns) == 1
    kept = saved["state"][0]["momentum_buffer"]
    assert torch.equal(kept, optimizer.state[held[0]]["momentum_buffer"])
    updater.step()
    assert not torch.equal(kept, optimizer.state[held[0]]["momentum_buffer"])
    optimizer.load_state_dict(saved)
    assert len(turns) == (2 if module is st.optim else 3)  # before and after loading
    del owner
    optimizer.state_dict()


def test_it_is_not_kept_by_the_optimizer() -> None:
    held = params()
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    updater, true = bound(optimizer, held, F64)
    graded(held)
    updater.step()
    gone = weakref.ref(true[0])
    gc.disable()
    try:
        del updater, true
        assert gone() is None
    finally:
        gc.enable()
    optimizer.load_state_dict(optimizer.state_dict())
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1


def test_where_its_state_is() -> None:
    optimizer = FOREIGN["Whitened"](params())
    graded(optimizer.param_groups[0]["params"])
    optimizer.step()
    assert updater_of(optimizer).loose_state() == []  # all of it on the CPU
    assert made("SGD", params()).stepper.loose_state() == []
