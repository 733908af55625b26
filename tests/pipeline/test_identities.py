"""Tests identities between methods, independent of the oracle."""

from __future__ import annotations

import copy
import dataclasses

import hypothesis.strategies as some
import pytest
import torch
from helpers.pipeline_cases import (
    batches,
    close,
    examples,
    float64,  # noqa: F401  # a fixture
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from hypothesis import given
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Interleaved

few = examples(12)
FLUSHING = ("sync", "gpipe", "1f1b", "interleaved", "zb-h1")
# Those that differ from synchronous training even on one stage: they have a fixed delay.
DELAYED = ("pipedream-2bw", "error-feedback", "xgrad")
PREDICTING = [
    name
    for name in st.methods()
    if name not in (*FLUSHING, *DELAYED, "vanilla", "pipedream", "pipedream-vertical-sync")
    and name not in ("wpipe", "interleaved-async")
]


def one_device(stages, data, m=1, before_step=None, **options):
    """Plain training of all stages as one model: (losses, the model)."""
    model = nn.Sequential(*copy.deepcopy(stages))
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        losses.append(mse(model(x), y))
        losses[-1].backward()
        if before_step:
            before_step(model)
        optimizer.step()
    return losses, model


def trained(stages, data, method, optimizer=None, **more):
    pipe = st.Pipeline(copy.deepcopy(stages), optimizer or sgd(), mse, method, **more)
    return [result.loss for result in pipe.run(data)], pipe


def assert_same(found, expected, same=close):
    same(torch.stack(found[0]), torch.stack(expected[0]))
    for mine, theirs in zip(found[1].parameters(), expected[1].parameters(), strict=True):
        same(mine.detach(), theirs.detach())


def same_bits(found, expected):
    assert torch.equal(found, expected)


@few
@given(
    name=some.sampled_from(PREDICTING),
    n=some.integers(1, 5),
    count=some.integers(1, 9),
    m=some.integers(1, 3),
    window=some.sampled_from(("classic", "wide", 3)),
)
def test_no_horizon_is_no_prediction(name, n, count, m, window):
    """s = 0 and no correction is vanilla, or pipedream if backwards use the forward's weights."""
    method = find_method(name)
    averaged = name == "spectrain-smoothed"
    without = dataclasses.replace(
        method,
        forward_horizon=lambda place: 0,
        backward_horizon=lambda place: 0,
        lead=lambda place: 0,
        once=False,
        correction=None,
        rates=None,
    )
    stages, data = tanh_stages(n), batches(count, size=4)
    other = "pipedream" if method.backward == "stash" else "vanilla"
    found, expected = (
        trained(stages, data, x, sgd(smoothed=averaged), microbatches=m, window=window)
        for x in (without, other)
    )
    assert_same(found, expected, same_bits)


@few
@given(
    name=some.sampled_from([name for name in st.methods() if name not in DELAYED]),
    count=some.integers(1, 6),
    m=some.integers(1, 4),
    options=some.sampled_from(({}, {"nesterov": True}, {"weight_decay": 0.1})),
)
def test_one_stage_is_synchronous_training(name, count, m, options):
    if name == "xpipe":  # its microbatches wait for each other, even on one stage
        m = 1
    stages, data = tanh_stages(1, layers=3), batches(count, size=5)
    averaged = name == "spectrain-smoothed"  # a sum's lr is an average's lr*(1 - mu)
    optimizer = sgd(lr=0.5, smoothed=True, **options) if averaged else sgd(**options)
    found = trained(stages, data, name, optimizer, microbatches=m)
    assert_same(found, one_device(stages, data, **options))


@few
@given(
    schedule=some.sampled_from(FLUSHING),
    n=some.integers(1, 6),
    m=some.integers(1, 7),
    size=some.integers(1, 9),
    count=some.integers(1, 3),
)
def test_a_flush_gives_the_gradients_of_one_device(schedule, n, m, size, count):
    stages, data = tanh_stages(n), batches(count, size=size)
    mine, theirs = [], []  # of every stage, and of the model

    def optimizer(params):
        made, found = sgd()(params), []
        mine.append(found)
        made.register_step_pre_hook(lambda *_: found.append([p.grad.clone() for p in params]))
        return made

    found = trained(stages, data, schedule, optimizer, microbatches=m)
    expected = one_device(
        stages,
        data,
        before_step=lambda model: theirs.append([p.grad.clone() for p in model.parameters()]),
    )
    assert_same(found, expected)
    for i, gradients in enumerate(theirs):
        close([gradient for of_stage in mine for gradient in of_stage[i]], gradients)


@few
@given(
    n=some.integers(1, 5),
    more=some.integers(0, 3),
    count=some.integers(1, 6),
    options=some.sampled_from(({}, {"momentum": 0.0}, {"nesterov": True, "weight_decay": 0.1})),
)
def test_the_delay_of_2bw_is_one(n, more, count, options):
    """W(t+1) = W(t) - lr*update(gradient at W(t-1)), on every stage, whatever N and M."""
    m = n + more
    stages, data = tanh_stages(n), batches(count, size=m)
    found = trained(stages, data, "pipedream-2bw", sgd(**options), microbatches=m)

    model = nn.Sequential(*copy.deepcopy(stages))
    optimizer = torch_sgd(**options)(model.parameters())
    losses, earlier = [], copy.deepcopy(model)
    for x, y in data:
        losses.append(mse(earlier(x), y))
        gradients = torch.autograd.grad(losses[-1], list(earlier.parameters()))
        earlier = copy.deepcopy(model)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    assert_same(found, (losses, model))


@few
@given(
    n=some.integers(1, 6),
    m=some.integers(1, 4),
    count=some.integers(1, 6),
    options=some.sampled_from(({}, {"momentum": 0.0}, {"nesterov": True, "weight_decay": 0.1})),
)
def test_half_of_wpipe_is_late_by_one_update(n, m, count, options):
    """The first half's W(t+1) = W(t) - lr*update(gradient at W(t-1)), the second half's at W(t)."""
    stages, data = tanh_stages(n), batches(count, size=m)
    found = trained(stages, data, "wpipe", sgd(**options), microbatches=m)

    model = nn.Sequential(*copy.deepcopy(stages))
    optimizer = torch_sgd(**options)(model.parameters())
    losses, earlier = [], copy.deepcopy(model)
    for x, y in data:
        used = nn.Sequential(*earlier[: n // 2], *copy.deepcopy(model)[n // 2 :])
        losses.append(mse(used(x), y))
        gradients = torch.autograd.grad(losses[-1], list(used.parameters()))
        earlier = copy.deepcopy(model)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    assert_same(found, (losses, model))


@few
@given(n=some.integers(1, 6), m=some.integers(1, 5), count=some.integers(1, 4))
def test_interleaved_has_the_bits_of_gpipe(n, m, count):
    stages, data = tanh_stages(n), batches(count, size=5)
    found, expected = (
        trained(stages, data, name, microbatches=m) for name in ("interleaved", "gpipe")
    )
    assert_same(found, expected, same_bits)


@few
@given(n=some.integers(1, 5), m=some.integers(1, 4), count=some.integers(1, 7))
def test_one_chunk_without_a_flush_is_a_wide_window(n, m, count):
    own = dataclasses.replace(
        find_method("pipedream"), name="own", schedule=Interleaved(1, flushes=False)
    )
    stages, data = tanh_stages(n), batches(count, size=4)
    found = trained(stages, data, own, microbatches=m)
    expected = trained(stages, data, "pipedream", microbatches=m, window="wide")
    assert_same(found, expected, same_bits)


@examples(60)
@given(
    options=some.fixed_dictionaries(
        {
            "lr": some.floats(1e-3, 0.5),
            "momentum": some.floats(0.05, 0.99),
            "weight_decay": some.sampled_from((0.0, 0.0, 0.01, 0.2)),
            "maximize": some.booleans(),
        }
    ),
    extra=some.sampled_from(({}, {"nesterov": True}, {"dampening": 0.3})),
    steps=some.integers(0, 12),
    updates=some.integers(1, 4),
)
def test_the_geometric_law_is_further_steps_without_gradient(options, extra, steps, updates):
    torch.manual_seed(0)
    mine = nn.Parameter(torch.randn(7, dtype=torch.float64))
    theirs = nn.Parameter(mine.detach().clone())
    optimizer = st.optim.SGD([mine], **options, **extra)
    reference = torch.optim.SGD([theirs], **options, **extra)
    for _ in range(updates):
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for _ in range(steps):
        theirs.grad = torch.zeros_like(theirs)
        reference.step()
    with optimizer.predicted(st.laws.Geometric(steps)):
        close(mine.detach(), theirs.detach())


@pytest.mark.parametrize("name", ["xgrad", "pipedream-2bw"])
def test_a_delay_of_its_own_is_not_synchronous_on_one_stage(name):
    """Otherwise the identity above would exclude them without reason."""
    stages, data = tanh_stages(1), batches(6)
    found, expected = trained(stages, data, name)[0][-1], one_device(stages, data)[0][-1]
    assert abs(found - expected) > 1e-6
