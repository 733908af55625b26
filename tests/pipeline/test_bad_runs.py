"""Tests the errors of a run: each names the problem, its place and what was expected."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from helpers.random_modules import Function
from torch import nn

import spectrain_ext as st

X = torch.zeros(2, 5)


def scaled(output, target):
    return (output - target) ** 2


@pytest.mark.parametrize(
    ("loss_fn", "error", "match"),
    [
        (scaled, ValueError, r"must return a scalar \(a 0-d tensor\), got shape \(3, 5\)"),
        (lambda out, y: mse(out, y).reshape(1), ValueError, r"got shape \(1,\)"),
        (lambda out, y: 0.5, TypeError, r"a 0-d tensor, or a pair \(sum, count\), got a float"),
        (lambda out, y: mse(out, y) * 1j, TypeError, "must return a real number, got torch.c"),
        (lambda out, y: mse(out, y).detach(), ValueError, "does not depend on the output"),
        (lambda out, y: (out > y).sum(), ValueError, "does not depend on the output"),
        (lambda out, y: mse(out.detach(), y), ValueError, "does not depend on the output"),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_losses(loss_fn, error, match, recompute):
    pipe = st.Pipeline(tanh_stages(3), sgd(), loss_fn, microbatches=1, recompute=recompute)
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(st.StageError, match=match) as caught:
        losses(pipe, batches(4))
    assert isinstance(caught.value.__cause__, error)
    assert (caught.value.stage, caught.value.minibatch) == (2, 0)
    assert caught.value.action in (["loss", "recompute"] if recompute else ["loss"])
    assert all(map(torch.equal, pipe.state_dict().values(), before.values()))


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (lambda x: (x, {3}), r"a stage's output\[1\]: expected a tensor, or tuples, .* got a set"),
        (lambda x: None, "a stage's output: expected a tensor in it, got None"),
    ],
)
def test_activations(output, match):
    pipe = st.Pipeline([*tanh_stages(1), Function(output), *tanh_stages(1)], sgd(), mse)
    with pytest.raises(st.StageError, match=match) as caught:
        losses(pipe, batches(4))
    assert isinstance(caught.value.__cause__, TypeError) and caught.value.stage == 1


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (X, TypeError, r"expected a pair \(input, target\), .* got a Tensor"),
        ((X,), TypeError, r"expected a pair .* got a tuple of length 1"),
        ([X] * 3, TypeError, r"expected a pair .* got a list of length 3"),
        ([], TypeError, r"expected a pair .* got a list of length 0"),
        (st.Microbatches(), TypeError, "expected a pair .* Microbatches of length 0"),
        ([(X, X), (X, X), X], TypeError, "expected a pair .* or a list of .* list of length 3"),
        ({"x": 1, "y": [2]}, TypeError, r"expected a tensor in it, got \{'x': 1, 'y': \[2\]\}"),
        (((), None), TypeError, r"expected a tensor in it, got \(\(\), None\)"),
        ([(X, X)] * 3, ValueError, "expected a list of at most 2 .* got 3"),
        ((torch.zeros(4, 5), torch.zeros(3, 5)), ValueError, r"has 4, the target has shape \(3, 5"),
        ((X, X.to("meta")), ValueError, r"the target: a tensor of shape \(2, 5\) is on the meta"),
    ],
)
def test_batches(batch, error, match):
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, microbatches=2)
    good = batches(2, size=4)
    with pytest.raises(error, match=r"batches\[2\].*" + match):
        losses(pipe, [*good, batch, *good])
    assert len(losses(pipe, good)) == 2


@pytest.mark.parametrize("given", [3, None, lambda: batches(2)])
def test_batches_that_are_not_iterable(given):
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    for call in (pipe.run, pipe.fit, pipe.evaluate):
        with pytest.raises(TypeError, match="batches: expected an iterable of batches, got "):
            call(given)


INPUT, TARGET = torch.randn(4, 5, dtype=torch.float64), torch.randint(3, (4,))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ((TARGET, INPUT), r"stage 0.*forward: .*; called with input torch.int64 of shape \(2,\)$"),
        ({"x": INPUT}, r"; called with input {'x': 'torch.float64 of shape \(2, 5\)'}$"),
        (
            (INPUT, TARGET.double()),
            r"loss: .*; called with output torch.float64 of shape \(2, 3\), target torch.float64",
        ),
    ],
)
def test_what_a_module_or_a_loss_was_called_with(batch, match):
    stages = [nn.Linear(5, 5), nn.Linear(5, 3)]
    pipe = st.Pipeline(stages, sgd(), nn.CrossEntropyLoss(), microbatches=2)
    with pytest.raises(st.StageError, match=match):
        losses(pipe, [batch])
    with pytest.raises(st.StageError, match=r"forward: .*input torch.int64 of shape \(4,\)"):
        pipe.evaluate([(TARGET, INPUT)])


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (torch.inference_mode, "inference mode is on"),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast is on"),
    ],
    ids=["inference", "autocast"],
)
def test_modes_around_a_run(inside, said):
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    with inside(), pytest.raises(RuntimeError, match=said):
        losses(pipe, batches(3))
    assert len(losses(pipe, batches(3))) == 3


# Parameters that left the pipeline


def assigned(stage):
    stage.load_state_dict(tanh_stages(1)[0].state_dict(), assign=True)


def given_other_data(stage):
    stage[0].weight.data = stage[0].weight.data.clone()


def converted(stage):
    stage.float().double()


LEAVES = {
    "to": lambda pipe: pipe.to(torch.float32),
    "assign": lambda pipe: pipe.load_state_dict(copy.deepcopy(pipe.state_dict()), assign=True),
    "stage": lambda pipe: assigned(next(pipe.children())),
    "data": lambda pipe: given_other_data(next(pipe.children())),
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
def test_a_parameter_that_left_the_flat_buffer(leave):
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    losses(pipe, batches(3))
    leave(pipe)
    values = copy.deepcopy(pipe.state_dict())
    with pytest.raises(RuntimeError, match=r"stages\[0\]: parameter '0.weight' left .* flat buf"):
        losses(pipe, batches(3))
    assert all(map(torch.equal, pipe.state_dict().values(), values.values()))


@pytest.mark.parametrize("leave", [assigned, given_other_data, converted])
def test_a_parameter_that_leaves_while_the_run_is_suspended(leave):
    module = tanh_stages(1)[0]
    pipe, seen = st.Pipeline([*tanh_stages(1), module], sgd(), mse), []
    with pytest.raises(RuntimeError, match=r"stages\[1\]: parameter '0.weight' left"):
        for result in pipe.run(batches(8)):
            seen.append(result.index)
            leave(module)
    assert leave is assigned or seen == [0]  # a replaced one is found at the end


def test_two_pipelines_of_one_model():
    stages = tanh_stages(2)
    first = st.Pipeline(stages, sgd(), mse)
    losses(first, batches(2))
    second = st.Pipeline(stages, sgd(), mse)
    with pytest.raises(RuntimeError, match=r"stages\[0\]: another pipeline of this model .*rel"):
        losses(first, batches(1))
    losses(second, batches(1))
    first.release()
    losses(second, batches(1))
    second.release()
    losses(first, batches(1))


def test_momentum_taken_away_later():
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, "spectrain")
    losses(pipe, batches(3))
    before = copy.deepcopy(pipe.state_dict())
    pipe.optimizers[1].param_groups[0]["momentum"] = 0.0
    with pytest.raises(st.StageError, match=r"stage 1.*momentum 0"):
        losses(pipe, batches(3))
    pipe.optimizers[1].param_groups[0]["momentum"] = 0.9
    assert torch.equal(pipe.state_dict()["1.0.weight"], before["1.0.weight"])
    losses(pipe, batches(3))
