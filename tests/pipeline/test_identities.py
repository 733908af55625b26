"""Tests identities between methods, independent of the oracle."""

from __future__ import annotations

import copy
import dataclasses

import hypothesis.strategies as some
import pytest
import torch
from helpers.pipeline_cases import batches, close, examples, mse, sgd, tanh_stages, torch_sgd
from hypothesis import given
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Interleaved

pytestmark = pytest.mark.usefixtures("float64")

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
    name=some.sampled_from(("pipedream-2bw", "wpipe")),
    n=some.integers(1, 6),
    more=some.integers(0, 3),
    count=some.integers(1, 6),
    options=some.sampled_from(({}, {"momentum": 0.0}, {"nesterov": True, "weight_decay": 0.1})),
)
def test_a_delay_of_one_update(name, n, more, count, options):
    """W(t+1) = W(t) - lr*update(gradient at W(t-1)): on every stage, or on WPipe's first half."""
    late, m = (n, n + more) if name == "pipedream-2bw" else (n // 2, 1 + more)
    stages, data = tanh_stages(n), batches(count, size=m)
    found = trained(stages, data, name, sgd(**options), microbatches=m)

    model = nn.Sequential(*copy.deepcopy(stages))
    optimizer = torch_sgd(**options)(model.parameters())
    losses, earlier = [], copy.deepcopy(model)
    for x, y in data:
        used = nn.Sequential(*earlier[:late], *copy.deepcopy(model)[late:])
        losses.append(mse(used(x), y))
        gradients = torch.autograd.grad(losses[-1], list(used.parameters()))
        earlier = copy.deepcopy(model)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    assert_same(found, (losses, model))


WIDE = {"window": "wide"}


def own(name, **changed):
    return dataclasses.replace(find_method(name), name="own", **changed)


def dropping(n):
    return [nn.Sequential(*s, nn.Dropout(0.3), nn.BatchNorm1d(5)) for s in tanh_stages(n)]


# Two ways to the same bits: (method, its options), (another, its options).
EQUAL = [
    (("interleaved", {}), ("gpipe", {})),
    (("zb-h1", {}), ("1f1b", {})),
    (("zb-h1", {"recompute": True}), ("1f1b", {})),
    (("zb-h1-async", {}), ("auto", {})),
    *(
        ((own(name, schedule="zb-h1-async"), {}), (name, {}))
        for name in ("vanilla", "pipedream-vertical-sync", "spectrain", "xpipe", "lwp-w")
    ),
    ((own("pipedream", schedule=Interleaved(1, flushes=False)), {}), ("pipedream", WIDE)),
    *(((own(name), {}), (name, {})) for name in ("sync", "second-order")),
]


@pytest.mark.parametrize("ways", EQUAL)
@examples(2)
@given(
    make=some.sampled_from((tanh_stages, dropping)),
    n=some.integers(2, 4),
    m=some.integers(1, 4),
    count=some.integers(4, 6),
    clipping=some.sampled_from(({}, {"clip_norm": 0.05, "clip_scope": "stage"})),
)
def test_two_ways_to_the_same_bits(ways, make, n, m, count, clipping):
    stages, data, found = make(n), batches(count, size=2 * m + 1, last=2 * m), []
    for method, more in ways:
        torch.manual_seed(3)  # of dropout
        found.append(trained(stages, data, method, microbatches=m, **more, **clipping))
    assert_same(*found, same_bits)
    buffers = [list(pipe.buffers()) for _, pipe in found]
    assert all(map(torch.equal, *buffers))


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
