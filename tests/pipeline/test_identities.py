"""Tests identities between methods, independent of the oracle."""

from __future__ import annotations

import copy
import dataclasses

import hypothesis.strategies as some
import pytest
import torch
from helpers.pipeline_cases import batches, close, examples, mse, sgd, tanh_stages
from hypothesis import given
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Interleaved

pytestmark = pytest.mark.usefixtures("float64")

# Those that differ from synchronous training even on one stage: they have a fixed delay.
DELAYED = ("pipedream-2bw", "error-feedback", "xgrad")


def one_device(stages, data, **options):
    """Plain training of all stages as one model: (losses, the model)."""
    model = nn.Sequential(*copy.deepcopy(stages))
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        losses.append(mse(model(x), y))
        losses[-1].backward()
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


@examples(12)
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
