"""Recomputation: the forward again, with the backward's weights, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
)
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

import spectrain_ext as st


@pytest.mark.parametrize("method", ["sync", "1f1b", "vanilla", "pipedream", "spectrain", "xpipe"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_oracle_recomputes_as_well(method, parts):
    compared = Compared(tanh_stages(4), method, microbatches=parts, recompute=True)
    compared.run(batches(10, size=4))
    compared.run(batches(3, size=4))


def test_a_first_layer_that_works_in_place():
    stages = [nn.Sequential(nn.ReLU(inplace=True), *s) for s in tanh_stages(3)]
    Compared(stages, "spectrain", recompute=True).run(batches(8))


def both(stages, method, data, loss_fn=mse, **more):
    """The losses and the states without recomputation and with it."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        own = [copy.deepcopy(stage) for stage in stages]
        loss = loss_fn() if loss_fn is Centred else loss_fn
        pipe = st.Pipeline(own, sgd(), loss, method, recompute=recompute, **more)
        found.append((torch.stack(losses(pipe, data)), pipe.state_dict()))
    return found


@pytest.mark.parametrize("method", ["sync", "gpipe", "pipedream"])
def test_where_forward_and_backward_weights_are_the_same_nothing_changes(method):
    """Dropout is drawn as it was, running statistics are updated once."""
    stages = [
        nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.ReLU(inplace=True))
        for _ in range(3)
    ]
    (losses_a, state_a), (losses_b, state_b) = both(
        stages, method, batches(9, size=6), microbatches=2
    )
    close(losses_b, losses_a)
    assert state_a.keys() == state_b.keys()
    for name, tensor in state_a.items():
        close(state_b[name], tensor)
    assert state_b["0.1.num_batches_tracked"] == 18


def test_a_loss_with_random_numbers_of_its_own():
    def loss_fn(output, target):
        return mse(torch.dropout(output, 0.5, True), target)

    (losses_a, state_a), (losses_b, state_b) = both(
        tanh_stages(3), "pipedream", batches(8), loss_fn=loss_fn
    )
    close(losses_b, losses_a)
    close(state_b["2.0.weight"], state_a["2.0.weight"])


class Centred(nn.Module):
    """Reads buffers that it changes, in place and by new ones; a layer, and a loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x, target=0):
        self.calls = self.calls + 1
        out = (x - self.centre - target) * (1 + 1 / self.calls)
        self.centre.data.lerp_(x.detach().mean(0), 0.3)  # autograd sees no new version
        return out if isinstance(target, int) else out.square().mean()


@pytest.mark.parametrize("method", ["sync", "gpipe", "pipedream"])
def test_module_buffers_are_those_of_the_forward(method):
    def stage():
        normed = [spectral_norm(nn.Linear(5, 5)), old_spectral_norm(nn.Linear(5, 5))]
        return nn.Sequential(normed[0], nn.Tanh(), Centred(), normed[1], nn.BatchNorm1d(5))

    (losses_a, state_a), (losses_b, state_b) = both(
        [stage() for _ in range(3)], method, batches(7, size=6), Centred, microbatches=2
    )
    close(losses_b, losses_a)
    assert state_a.keys() == state_b.keys()
    for name, tensor in state_a.items():
        close(state_b[name], tensor)
    assert state_b["0.2.calls"] == 14


def test_a_second_forward_that_fails_leaves_the_buffers_of_the_first():
    class Failing(Centred):
        def forward(self, x):
            out = super().forward(x)
            if torch.is_grad_enabled() and self.calls == 3:
                raise ArithmeticError("planned")
            return out

    stages = [nn.Sequential(nn.Linear(5, 5), Failing()), *tanh_stages(1)]
    pipe = st.Pipeline(stages, sgd(), mse, "gpipe", microbatches=3, recompute=True)
    with pytest.raises(st.StageError, match="planned"):
        losses(pipe, batches(1))
    assert stages[0][1].calls == 3


class Pair(nn.Module):
    """Takes and returns a tuple, one member of which nobody learns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, value):
        x, index = value if isinstance(value, tuple) else (value, torch.arange(3))
        return self.linear(x).tanh() + index.sum() * 0.01, index


def test_tuples_and_members_without_a_gradient():
    stages = [Pair(), Pair(), Pair()]
    found = both(stages, "pipedream", batches(6), loss_fn=lambda out, y: mse(out[0], y))
    close(found[1][0], found[0][0])
    for name, tensor in found[0][1].items():
        close(found[1][1][name], tensor)


def test_only_inputs_are_kept():
    """What autograd saves is gone when the forward has ended."""
    for recompute in (False, True):
        alive = []

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, alive=alive):
                ctx.marker = Marker(alive)
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient * 2, None

        class Layer(nn.Module):
            def forward(self, x, function=Watched):
                return function.apply(x)

        most = 0

        def note(output, target):
            nonlocal most
            most = max(most, len(alive))  # noqa: B023
            return mse(output, target)

        stages = [nn.Sequential(nn.Linear(5, 5), Layer()), *tanh_stages(3)]
        losses(st.Pipeline(stages, sgd(), note, "vanilla", recompute=recompute), batches(12))
        assert most == (0 if recompute else 3)


class Marker:
    """Is in a list for as long as it lives."""

    def __init__(self, alive):
        self.alive = alive
        alive.append(1)

    def __del__(self):
        self.alive.pop()


def test_a_loss_that_nothing_can_be_learned_from():
    pipe = st.Pipeline(tanh_stages(2), sgd(), lambda out, y: mse(out.detach(), y), recompute=True)
    with pytest.raises(st.StageError, match="does not depend on the output"):
        losses(pipe, batches(3))
    assert len(pipe._executor.stages[0]._tapes) == 0
