"""Tests modules that random programs do not draw, and the random numbers of stages.

``helpers.random_modules`` and ``oracle.cases`` have blocks, forms of values, frozen parts and ties.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import Compared, batches, close, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from helpers.random_modules import Function
from torch import nn

import spectrain_ext as st

DELAYED = pytest.mark.parametrize("method", ["sync", "pipedream", "spectrain"])


class Split(nn.Module):
    """Returns (tensor, positions, mask, scale): with and without gradients, with integers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, value):
        hidden = torch.tanh(self.linear(value))
        return hidden, hidden.argmax(1), hidden.detach() > 0, self.scale * hidden.mean()


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.linear = nn.Linear(6, 5)

    def forward(self, values):
        hidden, positions, mask, scale = values
        return self.linear(torch.where(mask, hidden * scale, hidden) + self.embed(positions)), mask


@DELAYED
@pytest.mark.parametrize("recompute", [False, True])
def test_integers_and_numbers_between_stages(method, recompute):
    one = Function(lambda values: values[0] * 2)  # no gradient comes back for the other member
    stages = [Split(), Join(), one, *tanh_stages(1)]
    Compared(stages, method, recompute=recompute).run(batches(8))


class Spectrum(nn.Module):
    """Returns complex numbers, and accepts them; one frozen parameter is complex."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.cdouble), requires_grad=False)

    def forward(self, value):
        if value.is_complex():
            value = torch.fft.irfft(value, n=6)
        return (torch.fft.rfft(torch.tanh(self.linear(value))) * self.phase).conj()


@DELAYED
@pytest.mark.parametrize("recompute", [False, True])
def test_complex_activations(method, recompute):
    """Between stages, at the output, and with a gradient back to the first stage."""

    def loss_fn(output, target):
        return (output.abs() ** 2).mean() + mse(torch.fft.irfft(output, n=6), target)

    more = {"microbatches": 2, "clip_norm": 0.1, "recompute": recompute}
    compared = Compared([Spectrum(), Spectrum(), Spectrum()], method, loss_fn=loss_fn, **more)
    before = compared.pipe.state_dict()["0.linear.weight"].clone()
    compared.run(batches(6, size=4, width=6))
    assert not torch.equal(compared.pipe.state_dict()["0.linear.weight"], before)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, value):
        return torch.tanh(self.two(torch.tanh(self.one(value))))


@DELAYED
def test_tied_parameters_within_a_stage(method):
    compared = Compared([Tied(), Tied(), Tied()], method)
    compared.run(batches(8))
    for result in compared.pipe.run(batches(5)):
        if result.index == 3:
            state = compared.pipe.state_dict()
            assert torch.equal(state["0.one.weight"], state["0.two.weight"])


def test_momentum_of_16_bit_weights_may_be_wider():
    stage = nn.Linear(5, 5).bfloat16()
    with pytest.warns(UserWarning, match="is torch.bfloat16"):
        pipe = st.Pipeline([stage], sgd(momentum_dtype=torch.float32), mse)
    losses(pipe, [(x.bfloat16(), y.bfloat16()) for x, y in batches(2)])
    state = pipe.optimizers[0].state
    assert {state[p]["momentum_buffer"].dtype for p in stage.parameters()} == {torch.float32}


# Random numbers


class Masks(nn.Module):
    """Remembers random numbers drawn in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.seen = []

    def forward(self, value):
        self.seen.append(torch.rand(3))
        return torch.dropout(self.linear(value), 0.5, self.training)


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "zb-h1", "vanilla", "auto", "spectrain"])
def test_random_numbers_do_not_depend_on_the_schedule_or_the_caller(method):
    def run(method, draws):
        torch.manual_seed(5)
        stages, given = [Masks() for _ in range(3)], []
        before = torch.get_rng_state()
        data = batches(7)
        torch.set_rng_state(before)

        def drawing():
            for batch in data:
                given.append(torch.rand(1).item() if draws else 0.0)
                yield batch

        pipe = st.Pipeline(stages, sgd(lr=0.0), mse, method, microbatches=1)
        for _ in pipe.run(drawing()):
            if draws:
                torch.rand(7)
        assert draws or torch.equal(torch.get_rng_state(), before)
        assert not draws or len(set(given)) == 7
        return torch.stack([torch.stack(stage.seen) for stage in stages])

    masks = run("sync", False)
    assert torch.equal(run(method, False), masks)
    assert torch.equal(run(method, True), masks)
    assert len({tuple(row.tolist()) for row in masks.reshape(-1, 3)}) == 3 * 7


def test_seeds_do_not_share_numbers_between_stages():
    seen = set()
    for seed in range(4):
        torch.manual_seed(seed)
        stages = [Masks() for _ in range(3)]
        losses(st.Pipeline(stages, sgd(), mse, microbatches=1), batches(3))
        seen |= {tuple(row.tolist()) for stage in stages for row in stage.seen}
    assert len(seen) == 4 * 3 * 3


# The caller's batches


def test_a_batch_is_not_changed_and_may_be_refilled_as_soon_as_the_next_one_is_asked_for():
    """Also by a first layer that works in place."""
    data = batches(9)
    kept = copy.deepcopy(data)

    def refilled():
        x, y = torch.empty(3, 5), torch.empty(3, 5)
        for a, b in data:
            x.copy_(a)
            y.copy_(b)
            yield x, y
            x.fill_(float("nan"))
            y.fill_(float("nan"))

    stages = tanh_stages(3)
    stages[0].insert(0, nn.ReLU(inplace=True))
    pipes = [st.Pipeline(copy.deepcopy(stages), sgd(), mse) for _ in range(2)]
    fresh, reused = losses(pipes[0], data), losses(pipes[1], refilled())
    assert torch.equal(torch.stack(fresh), torch.stack(reused))
    assert all(map(torch.equal, sum(data, ()), sum(kept, ())))


class Sometimes(nn.Module):
    """Changes its input in place in only some forwards, after drawing random numbers."""

    def __init__(self, when):
        super().__init__()
        self.when, self.count, self.drawn = when, 0, []

    def forward(self, value):
        self.drawn.append(torch.rand(1).item())
        self.count += 1
        return value.relu_() if self.count in self.when else value.relu()


@pytest.mark.parametrize("marked", [(1, 6), (4, 5, 9)])
def test_a_first_layer_that_works_in_place_now_and_then(marked):
    """The identity before it exists when needed; random numbers do not change."""
    first, *layers = tanh_stages(3)
    found, drawn = [], []
    for when in ((), marked):
        torch.manual_seed(1)
        stages = copy.deepcopy([first, *(nn.Sequential(Sometimes(when), *each) for each in layers)])
        found.append(torch.stack(losses(st.Pipeline(stages, sgd(), mse), batches(10))))
        drawn.append([stage[0].drawn for stage in stages[1:]])
    close(found[1], found[0])
    for without, with_it in zip(*drawn, strict=True):
        assert list(dict.fromkeys(with_it)) == without  # a repeated forward draws the same
