"""Tests SavedWeights: a backward finds its weight version, whatever else a stage saves."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import (
    batches,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
)
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import spectrain_ext as st

PARTS = 2  # with one microbatch a later stage's backward overwrites


class Checkpointed(nn.Module):
    """A module whose forward runs again in its backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


class Modified(nn.Module):
    """Changes a saved tensor in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        y = self.layer(x).exp()
        found = y * 2
        y.add_(1)
        return found


def pipeline(stages, method="spectrain", **more):
    return st.Pipeline(stages, sgd(lr=0.05), mse, method, microbatches=PARTS, **more)


def trained(stages, data, **more):
    pipe = pipeline(stages, **more)
    found = losses(pipe, data)
    return torch.stack(found), [p.detach().clone() for p in pipe.parameters()]


def same(a, b):
    return torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))


@pytest.mark.parametrize("method", ["spectrain", "pipeoptim", "second-order", "lwp-w"])
def test_a_part_that_runs_again_meets_the_backwards_weights(method):
    """Using the forward's weights except in the checkpoint would mix two computations.

    A checkpointed part gets all its activations from the backward's weights. This equals the
    definition if the activations do not depend on the weights, as in a stage of one linear layer.
    """
    stages = [nn.Linear(5, 5) for _ in range(4)]
    data = batches(8, size=4)
    plain = trained(copy.deepcopy(stages), data, method=method)
    again = trained([Checkpointed(stage) for stage in stages], data, method=method)
    assert same(plain, again)


def test_hooks_around_the_run_see_all_that_is_no_weight():
    stages, data = tanh_stages(3), batches(6, size=4)
    plain = trained(copy.deepcopy(stages), data)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach().clone()

    def unpack(tensor):
        unpacked.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, unpack):
        hooked = trained(stages, data)
    assert same(plain, hooked)
    assert packed and len(packed) == len(unpacked)


def test_what_is_changed_in_place_after_it_was_saved_is_refused():
    """With hooks autograd does not check; the package raises the same error."""
    for method in ("spectrain", "vanilla"):
        pipe = pipeline([Modified(), *tanh_stages(2)], method)
        with pytest.raises(st.StageError, match="modified by an inplace operation") as raised:
            losses(pipe, batches(4, size=4))
        assert raised.value.stage == 0
        assert raised.value.action == "backward"
        pipe.release()
