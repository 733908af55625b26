"""Tests inputs and outputs of stages: dicts between them, batches that are mappings."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers.pipeline_cases import losses, mse, sgd, tanh_stages
from helpers.value_programs import data, loss_fn, stages
from torch import nn

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_first_stage_that_works_in_place_does_not_change_what_the_loss_gets(n, recompute):
    class Doubled(nn.Module):
        def forward(self, batch):
            return batch["x"].mul_(2)

    seen = []

    def loss(output, batch):
        seen.append(batch["x"].clone())
        return mse(output, batch["x"])

    batches = [{"x": torch.randn(4, 5)} for _ in range(6)]
    parts = [nn.Sequential(Doubled(), *tanh_stages(1)), *tanh_stages(n - 1)]
    pipe = st.Pipeline(parts, sgd(), loss, "spectrain", microbatches=2, recompute=recompute)
    losses(pipe, batches)
    for i, batch in enumerate(batches):
        for part in batch["x"].split(2):
            assert any(torch.equal(part, x) for x in seen), i


def test_calling_the_pipeline_with_a_mapping():
    pipe = st.Pipeline(stages(3, "dict", "dataclass", torch.float64), sgd(), mse).eval()
    (batch,) = data([4], "dict", torch.float64)
    output = pipe(UserDict(batch))
    plain = st.Pipeline(stages(3, "tuple", dtype=torch.float64), sgd(), mse).eval()
    ((value, _),) = data([4], "tuple", torch.float64)
    assert torch.equal(output.parts["h"][0], plain(value))


def test_other_mappings_between_stages_become_dicts():
    class Ordered(nn.Module):
        def forward(self, x):
            return OrderedDict(x=x)

    class Plain(nn.Module):
        def forward(self, value):
            assert type(value) is dict
            return value["x"]

    pipe = st.Pipeline([*tanh_stages(1), Ordered(), Plain(), *tanh_stages(1)], sgd(), mse)
    assert len(losses(pipe, [(torch.randn(4, 5), torch.randn(4, 5))] * 3)) == 3
    assert pipe(torch.zeros(2, 5)).shape == (2, 5)


@dataclass
class Hidden:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (Hidden, r"a stage's output: expected a tensor, or .* got a Hidden\. What the last stage"),
        (lambda x: {"x": x, "n": [{3}]}, r"output\['n'\]\[0\]: expected a tensor, .* got a set"),
        (lambda x: {0: x}, r"a stage's output: expected strings as keys, got 0"),
        (lambda x: ("x", [None]), r"a stage's output: expected a tensor in it, got \('x', \[None"),
    ],
)
def test_what_a_stage_before_the_last_may_not_return(output, match):
    class Odd(nn.Module):
        def forward(self, value):
            return output(value)

    pipe = st.Pipeline([*tanh_stages(1), Odd(), *tanh_stages(1)], sgd(), mse)
    with pytest.raises(st.StageError, match=match) as caught:
        losses(pipe, [(torch.zeros(4, 5), torch.zeros(4, 5))])
    assert caught.value.stage == 1


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": np.ones(4)}, TypeError, r"\['x'\]: .* got a ndarray, whose arrays or tensors"),
        ({"x": [Hidden(torch.ones(4))]}, TypeError, r"\['x'\]\[0\]: .* a Hidden, whose arrays or"),
        ({3: torch.ones(4)}, TypeError, "expected strings as keys, got 3"),
        ({"labels": torch.ones(3)}, ValueError, r"\['labels'\] has 3, the batch\['x'\] has shape"),
    ],
)
def test_mappings_that_are_no_batches(change, error, match):
    good, other = data([4, 4], "dict", torch.float64)
    parts = stages(2, "dict", dtype=torch.float64)
    pipe = st.Pipeline(parts, sgd(), loss_fn("dict"), microbatches=2)
    with pytest.raises(error, match=r"batches\[1\].*" + match):
        losses(pipe, [good, {**other, **change}])
    assert len(losses(pipe, [good])) == 1


def test_pairs_with_a_mapping_on_one_side():
    class First(nn.Module):
        def forward(self, batch):
            return batch["x"]

    pipe = st.Pipeline([First(), *tanh_stages(1)], sgd(), mse, microbatches=2)
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    plain = st.Pipeline([nn.Identity(), *tanh_stages(1)], sgd(), mse, microbatches=2)
    plain.load_state_dict(pipe.state_dict())
    assert losses(pipe, [({"x": x}, y)] * 3) == losses(plain, [(x, y)] * 3)
    with pytest.raises(TypeError, match=r"batches\[0\]: the input\['x'\]: .* got a ndarray"):
        losses(pipe, [({"x": np.ones(4)}, y)])
    with pytest.raises(ValueError, match=r"the input\['x'\] has 4, the target\['y'\] has shape"):
        losses(pipe, [({"x": x}, {"y": y[:3]})])


# Split dimensions


def time_first():
    """Return batches of (time, samples, features), the default of ``nn.LSTM``, with targets."""
    return [(torch.randn(7, size, 5), torch.randn(size, 5)) for size in (6, 6, 4)]


def last(output, target):
    return mse(output[-1], target)


def test_a_target_is_dense_whichever_dimension_it_is_cut_along():
    """A minibatch's targets are copied together; a loss may flatten a microbatch's by ``view``."""
    seen = []

    def flat(output, target):
        seen.append(target.shape)
        return mse(output.reshape(-1), target.view(-1))

    pipe = st.Pipeline(tanh_stages(2), sgd(), flat, "gpipe", microbatches=4, split_dim=-2)
    losses(pipe, [(x, x.clone()) for x, _ in time_first()])
    assert [shape[1] for shape in seen[:8]] == [2, 2, 1, 1, 2, 2, 1, 1]


def test_wrong_dimensions():
    data = time_first()

    def refused(match, split_dim, batches=data):
        more = {"microbatches": 2, "split_dim": split_dim}
        pipe = st.Pipeline(tanh_stages(2), sgd(), last, "gpipe", **more)
        with pytest.raises(ValueError, match=match):
            losses(pipe, batches)

    refused(r"in dimension 0, .*; the input has 7, the target has shape \(6, 5\); split_dim=", 0)
    refused(r"in dimension 3, .*; the input has shape \(7, 6, 5\)", (3, 0))
    refused(r"split_dim: of the input expected an int or None, got \(1, 2\)", ((1, 2), 0))
    refused("split_dim: of the target expected an int or None, got {'y': 0}", (1, {"y": 0}))
    refused("split_dim: of the target expected an int or None, got True", (1, True))
    pairs = [((x, x), y) for x, y in data]
    refused(r"input expected an int or None, or 2 of them, got \(1,\)", ((1,), 0), pairs)
    mapping = [{"x": x, "y": y} for x, y in data]
    refused(
        r"of the input expected an int or None, or a mapping of names among 'x', 'y', got",
        {"z": 1},
        mapping,
    )
    refused(r"batches\[0\] is a mapping, input and target in one; expected an int", (1, 0), mapping)
    for bad in ("1", (1, 0, 0), True, None):
        with pytest.raises(ValueError, match="split_dim: expected an int, a pair"):
            st.Pipeline(tanh_stages(2), sgd(), mse, split_dim=bad)
    pipe = st.Pipeline(tanh_stages(2), sgd(), last, "sync")
    with pytest.warns(UserWarning, match=r"dimension 1 of the input; give split_dim=\(1, 0\)"):
        losses(pipe, data[:1])
