"""Tests that a backward finds its weight version, whatever else a stage saves."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import spectrain_ext as st


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


def trained(stages, data, method="spectrain"):
    # With one microbatch a later stage's backward overwrites.
    pipe = st.Pipeline(stages, sgd(), mse, method, microbatches=2)
    return [*losses(pipe, data), *pipe.parameters()]


@pytest.mark.parametrize("method", ["spectrain", "pipeoptim", "second-order", "lwp-w"])
def test_a_part_that_runs_again_meets_the_backwards_weights(method):
    """Using the forward's weights except in the checkpoint would mix two computations.

    A checkpointed part gets all its activations from the backward's weights. This equals the
    definition if the activations do not depend on the weights, as in a stage of one linear layer.
    """
    stages, data = [nn.Linear(5, 5) for _ in range(4)], batches(8, size=4)
    plain = trained(copy.deepcopy(stages), data, method)
    again = trained([Checkpointed(stage) for stage in stages], data, method)
    assert all(map(torch.equal, plain, again))


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
    assert all(map(torch.equal, plain, hooked))
    assert packed and len(packed) == len(unpacked)


@pytest.mark.parametrize("method", ["spectrain", "vanilla"])
def test_what_is_changed_in_place_after_it_was_saved_is_refused(method):
    """With hooks autograd does not check; the package raises the same error."""
    with pytest.raises(st.StageError, match="modified by an inplace operation") as raised:
        trained([Modified(), *tanh_stages(2)], batches(4, size=4), method)
    assert (raised.value.stage, raised.value.action) == (0, "backward")
