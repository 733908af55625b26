"""Tests optim.SGD against torch.optim.SGD for any parameters and gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    DTYPES,
    OPTIONS,
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


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *((options, torch.float64) for options in OPTIONS),
        *(
            (options, dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for options in OPTIONS[::3]
        ),
    ],
    ids=lambda o: ",".join(map(str, o.values())) if isinstance(o, dict) else str(o),
)
def test_many_steps_match_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = make_params(dtype)
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.05, **options)
    reference = torch.optim.SGD(theirs, lr=0.05, foreach=False, **options)
    for step in range(20):
        # Parameter 5 gets its first gradient late, parameter 0 misses some.
        none = [5] if step < 4 else [0] if step % 3 == 0 else []
        give_gradients(ours, theirs, none=none)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    buffers, expected = momenta(optimizer, ours), momenta(reference, theirs)
    if options["momentum"]:
        assert_same(buffers, expected)
    else:
        assert buffers == expected == [None] * len(ours)


def test_multiple_groups_have_their_own_options() -> None:
    ours = make_params()
    theirs = twins(ours)

    def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": 0.3, "momentum": 0.0},
            {"params": params[2:4], "weight_decay": 0.1, "nesterov": True},
            {"params": params[4:], "dampening": 0.5, "maximize": True},
        ]

    optimizer = st.optim.SGD(groups(ours), lr=0.02, momentum=0.8)
    reference = torch.optim.SGD(groups(theirs), lr=0.02, momentum=0.8)
    for _ in range(10):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()


def test_one_group_may_mix_dtypes() -> None:
    ours = [nn.Parameter(torch.randn(9, dtype=dtype)) for dtype in DTYPES]
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, foreach=False)
    for _ in range(5):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_real_training_matches_torch() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()
    model = model.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    optimizer = st.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    reference = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for _ in range(10):
        x, target = torch.randn(6, 1, 6, 6).double(), torch.randint(3, (6,))
        for net, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), target).backward()
            opt.step()
    assert_same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_float32_momentum_of_16_bit_weights(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    optimizer = st.optim.SGD(params, lr=0.01, momentum=0.9, momentum_dtype=torch.float32)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    for _ in range(20):
        give_gradients(params)
        for v, p in zip(exact, params, strict=True):
            v.mul_(0.9).add_(p.grad.double())
        optimizer.step()
    for v, buffer in zip(exact, momenta(optimizer, params), strict=True):
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer.double(), v, rtol=1e-5, atol=1e-5)


def test_no_gradient_no_change_and_no_state() -> None:
    params = make_params()
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    kept = bits(params)
    optimizer.step()
    assert_bits(params, kept)
    assert not optimizer.state


@pytest.mark.parametrize("set_to_none", (True, False))
def test_zero_grad(set_to_none: bool) -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for _ in range(4):
        for opt, params in ((optimizer, ours), (reference, theirs)):
            opt.zero_grad(set_to_none=set_to_none)
            sum((p * p).sum() for p in params).backward()
            opt.step()
    assert_same(ours, theirs)


def test_a_step_keeps_no_gradient_alive() -> None:
    params, optimizer = trained()
    give_gradients(params)
    grad = weakref.ref(params[0].grad)
    optimizer.step()
    optimizer.zero_grad()
    assert grad() is None


def test_dropping_the_optimizer_frees_its_memory_without_the_collector() -> None:
    params, optimizer = trained()
    with optimizer.predicted(1.0):
        pass
    buffer = weakref.ref(optimizer.state[params[0]]["momentum_buffer"])
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert buffer() is None
    finally:
        gc.enable()


def test_gradients_of_another_layout() -> None:
    ours = [
        nn.Parameter(torch.randn(4, 3, 5, 5).double()),
        nn.Parameter(torch.randn(6, 4).double()),
    ]
    ours += [nn.Parameter(torch.randn(3, 2).double()), nn.Parameter(torch.randn(5).double())]
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for _ in range(3):
        grads = [
            torch.randn(4, 3, 5, 5).double().contiguous(memory_format=torch.channels_last),
            torch.randn(4, 6).double().t(),
            torch.randn(1, 1).double().expand(3, 2),
            torch._neg_view(torch.randn(5).double()),
        ]
        for params in (ours, theirs):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:Using backward.*with create_graph")
def test_gradients_that_carry_a_graph() -> None:
    p = nn.Parameter(torch.randn(5).double())
    q = nn.Parameter(p.detach().clone())
    for param, opt in (
        (p, st.optim.SGD([p], lr=0.1, momentum=0.9)),
        (q, torch.optim.SGD([q], lr=0.1, momentum=0.9)),
    ):
        (param**3).sum().backward(create_graph=True)
        opt.step()
        param.grad = None
    assert_same([p], [q])


def test_sparse_gradients_are_refused_and_nothing_changes() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    other = nn.Parameter(torch.randn(4))
    optimizer = st.optim.SGD(
        [{"params": [other]}, {"params": embedding.parameters()}], lr=0.1, momentum=0.9
    )
    (embedding(torch.tensor([1, 2])).sum() + other.sum()).backward()
    kept = bits([other, embedding.weight])
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 1 is sparse"):
        optimizer.step()
    assert_bits([other, embedding.weight], kept)
    assert not optimizer.state


def test_parameters_that_move_between_steps() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for step in range(6):
        if step in (2, 4):
            for p in ours:
                p.data = p.data.clone()
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("momentum_dtype", (None, torch.float32))
def test_a_module_that_changes_dtype_between_steps(momentum_dtype: torch.dtype | None) -> None:
    model = nn.Linear(5, 3).to(torch.bfloat16)
    optimizer = st.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, momentum_dtype=momentum_dtype
    )
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.bfloat16):
        model.to(dtype)
        before = bits(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert all((a < b).all() for a, b in zip(model.parameters(), before, strict=True))
        for buffer in momenta(optimizer, list(model.parameters())):
            assert buffer.dtype in (dtype, torch.float32)


@pytest.mark.parametrize("how", ("replaced", "rebound", "deleted", "cleared"))
def test_momentum_that_the_caller_changes_is_used(how: str) -> None:
    params, optimizer = trained()
    state = optimizer.state
    if how == "replaced":
        state[params[3]]["momentum_buffer"] = torch.zeros(4, 3, 5, 5).double()
    elif how == "rebound":
        state[params[3]]["momentum_buffer"].data = torch.zeros(4, 3, 5, 5).double()
    elif how == "deleted":
        del state[params[3]]
    else:
        state[params[3]].clear()
    kept = bits(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    changed = [not torch.equal(p, k) for p, k in zip(params, kept, strict=True)]
    assert changed == [True, True, False, False, True, True]


def test_momentum_of_another_layout_and_dtype() -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = st.optim.SGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    start = torch.randn(4, 3, 5, 5)
    optimizer.state[ours[3]]["momentum_buffer"] = start
    reference.state[theirs[3]]["momentum_buffer"] = start.double()
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same(momenta(optimizer, ours), momenta(reference, theirs))


def test_parameters_that_the_caller_exchanges() -> None:
    params = make_params()
    optimizer = st.optim.SGD(params, lr=0.1)
    give_gradients(params)
    optimizer.step()
    old, new = params[0], nn.Parameter(params[0].detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    kept = old.detach().clone()
    give_gradients(params, [new, *params[1:]])
    optimizer.step()
    assert torch.equal(old.detach(), kept)
    assert_same([new], [kept - 0.1 * new.grad])
