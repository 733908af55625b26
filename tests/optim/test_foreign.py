"""Tests Foreign: a user's optimizer steps on the true weights, invisibly to everything else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers.foreign_optimizers import FOREIGN, Lion, Replacing
from torch import nn

from spectrain_ext.optim import SGD
from spectrain_ext.optim.base import updater_of
from spectrain_ext.optim.foreign import Foreign


def params(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((3, 2), (3,))]


def graded(held, value=1.0):
    for p in held:
        p.grad = torch.full_like(p, value)


def bound(optimizer, held, dtype=None):
    """Return an updater and its master, whose values differ from the parameters'."""
    master = None
    if dtype is not None:
        master = {p: (p.detach() * 2).to(dtype) for p in held}
    found = Foreign(optimizer)
    found.bind(master, {})
    return found, master


def test_the_packages_own_have_nothing_before_them():
    own = SGD(params(), lr=0.1)
    assert updater_of(own) is own
    assert isinstance(updater_of(torch.optim.SGD(params(), lr=0.1)), Foreign)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_no_version_moves_and_parameters_are_where_they_were(name, dtype):
    held = params()
    alone = copy.deepcopy(held) if dtype is None else [nn.Parameter(p.detach() * 2) for p in held]
    expected, optimizer = FOREIGN[name](alone), FOREIGN[name](held)
    updater, master = bound(optimizer, held, dtype)
    before = [(p._version, p.data_ptr(), p.detach().clone()) for p in held]
    for value in (1.0, -0.5):
        graded(alone, value)
        expected.step()
        graded(held, value)
        updater.step()
    for p, other, (version, at, values) in zip(held, alone, before, strict=True):
        assert (p._version, p.data_ptr()) == (version, at)
        assert torch.equal(p if master is None else master[p], other)
        assert master is None or torch.equal(p, values)
        assert p in optimizer.state or name == "Replacing"


def test_a_saved_tensor_survives_a_step():
    """A backward uses the parameter's present content and does not raise."""
    for dtype in (None, torch.float32):
        held = params()
        updater, _ = bound(torch.optim.SGD(held, lr=0.5), held, dtype)
        weight, _ = held
        x = torch.randn(4, 2, requires_grad=True)
        out = nn.functional.linear(x, weight).tanh() * weight.sum()
        graded(held)
        updater.step()
        out.sum().backward()
        assert x.grad is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held = params()
        out = (held[0] * held[0]).sum()
        graded(held)
        torch.optim.SGD(held, lr=0.5).step()
        out.backward()


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_wider_master(narrow):
    held = params(narrow)
    optimizer = torch.optim.AdamW(held, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend((p.dtype, None if p.grad is None else p.grad.dtype) for p in held)
    )
    updater, master = bound(optimizer, held, torch.float32)
    alone = [nn.Parameter(true.clone()) for true in master.values()]
    other = torch.optim.AdamW(alone, lr=0.1)
    graded(held[:1], 0.3)
    alone[0].grad = held[0].grad.float()
    updater.step()
    other.step()
    assert seen == [(torch.float32, torch.float32), (torch.float32, None)]
    assert [p.dtype for p in held] == [narrow, narrow]
    assert all(p.grad is None for p in held)
    for p, expected in zip(held, alone, strict=True):
        assert torch.equal(master[p], expected)
    assert optimizer.state[held[0]]["exp_avg"].dtype == torch.float32


def test_state_keeps_its_digits_while_it_is_bound():
    held = params(torch.bfloat16)
    optimizer = torch.optim.AdamW(held, lr=0.1)
    updater, _ = bound(optimizer, held, torch.float32)
    graded(held, 0.3)
    updater.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for index, p in enumerate(held):
        for key, value in saved["state"][index].items():
            assert optimizer.state[p][key].dtype == value.dtype == torch.float32
            assert torch.equal(optimizer.state[p][key], value)
    updater.unbind()
    assert optimizer.state[held[0]]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[held[0]]["step"].dtype == torch.float32
    graded(held)
    optimizer.step()
    optimizer.load_state_dict(saved)  # and it is torch's own again
    assert optimizer.state[held[0]]["exp_avg"].dtype == torch.bfloat16
    updater.bind({p: p.detach().float() for p in held}, {})
    assert optimizer.state[held[0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_new_data_is_copied_to_where_the_weights_are(dtype):
    held = params(torch.float32 if dtype is None else torch.bfloat16)
    updater, master = bound(Replacing(held, lr=0.5), held, dtype)
    true = held if master is None else list(master.values())
    expected = [t.detach() - 0.5 for t in true]
    at = [p.data_ptr() for p in held]
    for _ in range(2):
        graded(held)
        updater.step()
        assert [p.data_ptr() for p in held] == at
        for found, value in zip(true, expected, strict=True):
            assert torch.equal(found, value)
            value -= 0.5


def test_an_exception_leaves_the_parameters_in_place():
    class Failing(Lion):
        def step(self):
            super().step()
            raise ArithmeticError("planned")

    held = params()
    updater, _ = bound(Failing(held), held, torch.float64)
    before = [(p._version, p.data_ptr(), p.dtype) for p in held]
    graded(held)
    with pytest.raises(ArithmeticError, match="planned") as error:
        updater.step()
    assert error.value.__notes__ == [
        "the step of Failing was cut short: of the stage's true weights and optimizer state some "
        "may have been updated and others not"
    ]
    assert [(p._version, p.data_ptr(), p.dtype) for p in held] == before


def test_the_owner_takes_turns_with_whoever_reads_or_loads_state():
    class Owner:
        def __init__(self):
            self.turns = 0

        def turn(self):
            self.turns += 1
            return torch.no_grad()

    held, owner = params(), Owner()
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    updater, _ = bound(optimizer, held)
    updater.order_by(owner.turn)
    graded(held)
    updater.step()
    saved = optimizer.state_dict()
    assert owner.turns == 1
    kept = saved["state"][0]["momentum_buffer"]
    assert torch.equal(kept, optimizer.state[held[0]]["momentum_buffer"])
    updater.step()
    assert not torch.equal(kept, optimizer.state[held[0]]["momentum_buffer"])
    optimizer.load_state_dict(saved)
    assert owner.turns == 3
    del owner
    optimizer.state_dict()


def test_it_is_not_kept_by_the_optimizer():
    held = params()
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    updater, master = bound(optimizer, held, torch.float64)
    graded(held)
    updater.step()
    gone = weakref.ref(next(iter(master.values())))
    gc.disable()
    try:
        del updater, master
        assert gone() is None
    finally:
        gc.enable()
    optimizer.load_state_dict(optimizer.state_dict())
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1


def test_loose_state():
    optimizer = FOREIGN["Whitened"](params())
    graded(optimizer.param_groups[0]["params"])
    optimizer.step()
    assert updater_of(optimizer).loose_state() == []  # all of it on the CPU
    assert SGD(params(), lr=0.1).loose_state() == []
