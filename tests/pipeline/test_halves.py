"""Tests backwards in two halves: the bits of whole ones, without repeated work."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers.foreign_optimizers import FOREIGN
from helpers.pipeline_cases import batches, losses, mse, sgd, tanh_stages
from helpers.random_modules import Function
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.schedule import Place, ScheduleError, backward_input, backward_weights, forward
from spectrain_ext.tools.simulation import check_generator

pytestmark = pytest.mark.usefixtures("float64")


class Doubled(torch.autograd.Function):
    """x*w in Python: both gradients or none."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class Module(nn.Module):
    """A function of a layer, a vector and the input."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.vector = nn.Parameter(torch.randn(8))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def joined(value):
    """Make one tensor of a stage's outputs."""
    first, *rest = value if isinstance(value, tuple) else (value,)
    return first + sum(tensor.mean() for tensor in rest)


# Random programs have usual layers, used once and twice, with halves.
CASES = {
    "a weight that weights meet": lambda: Module(
        lambda m, x: (x * m.vector.exp()) @ m.layer.weight
    ),
    "beside the input": lambda: Module(lambda m, x: (m.layer(x), m.vector.exp() * 2)),
    "beside and with it": lambda: Module(lambda m, x: (m.layer(x), m.layer.weight.exp())),
    "not at all": lambda: Module(lambda m, x: (x.detach() * m.vector, m.layer(m.vector))),
    "without a gradient": lambda: Module(lambda m, x: (m.layer(x), x.detach())),
    "in Python": lambda: Module(lambda m, x: m.layer(Doubled.apply(m.other(x), m.vector))),
    "reentrantly": lambda: Module(lambda m, x: m.other(checkpoint(m.layer, x, use_reentrant=True))),
}
WAYS = {
    "with a flush": ("zb-h1", "1f1b", {"microbatches": 3}),
    "without one": ("zb-h1-async", "auto", {"microbatches": 1}),
    # In a step of another package's optimizer, parameters have their masters' dtype: torch gives
    # them a new gradient accumulator, which is not in the graph of a second half.
    "on masters": ("zb-h1-async", "auto", {"microbatches": 1, "master_dtype": torch.float32}),
}


def bits(stages, method, data, optimizer=None, **more):
    """Return all of a training's results."""
    torch.manual_seed(3)
    pipe = st.Pipeline(copy.deepcopy(list(stages)), optimizer or sgd(), mse, method, **more)
    found = losses(pipe, data)
    return [*found, *pipe.state_dict().values(), *pipe.masters().values()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_whole_backwards(name, way):
    """The first stage's input needs no gradient: all of its backward is put off."""
    halves, whole, more = WAYS[way]
    stages = [CASES[name](), Function(joined), CASES[name](), Function(joined)]
    data = batches(6, size=7, width=8)
    if way == "on masters":
        more = {"optimizer": FOREIGN["AdamW"], **more}
        stages = [stage.bfloat16() for stage in stages]
        data = [(x.bfloat16(), y.bfloat16()) for x, y in data]
    found = bits(stages, halves, data, **more)
    assert_same(found, bits(stages, whole, data, **more))
    assert not any(torch.isnan(tensor).any() for tensor in found)


@pytest.mark.compiler
def test_compiled_parts_have_all_at_once():
    torch._dynamo.reset()  # after many compilations in one process, dynamo compiles no more
    compiled = Module(lambda m, x: m.other(torch.compile(m.layer, backend="aot_eager")(x)))
    stages, data = [nn.Linear(8, 8), compiled], batches(3, width=8)
    assert_same(*(bits(stages, name, data, microbatches=2) for name in ("zb-h1", "1f1b")))


def test_no_work_is_done_twice():
    counts = []
    for method in ("zb-h1", "1f1b"):
        with FlopCounterMode(display=False) as flops:
            bits(tanh_stages(3), method, batches(2), microbatches=3)
        counts.append(flops.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(("method", "begins"), [("zb-h1", "BB"), ("1f1b", "BWB")])
def test_gradients_of_weights_are_put_off(method, begins):
    """The last of two stages has a microbatch's second half after the next one's first half."""
    events, stages = [], tanh_stages(2)
    layer = stages[1][0]
    layer.register_forward_hook(
        lambda module, given, output: output.register_hook(lambda _: events.append("B")) and None
    )
    layer.weight.register_post_accumulate_grad_hook(lambda _: events.append("W"))
    losses(st.Pipeline(stages, sgd(), mse, method, microbatches=2), batches(1))
    assert "".join(events).startswith(begins)
    assert events.count("W") == 2


def late(place):
    """A forward between the halves, without the update that follows them."""
    ahead = place.window - 1
    for i in range(ahead):
        yield from forward(place, i, 0)
    i = 0
    while True:
        yield from backward_input(place, i, 0)
        yield from forward(place, i + ahead, 0)
        yield from backward_weights(place, i, 0)
        i += 1


@pytest.mark.parametrize("name", ["vanilla", "pipedream", "spectrain-stash", "second-order"])
def test_a_forward_between_the_halves(name):
    """It reads the same version as with whole backwards and as many microbatches in flight."""
    whole = replace(find_method(name), name="other", window=lambda k, n, m: n - k + 1)
    halves = replace(whole, schedule=late)
    stages, data = tanh_stages(3), batches(7, size=5, last=2)
    assert_same(*(bits(stages, each, data, microbatches=1) for each in (halves, whole)))


def crossing(place):
    """The first half comes before the previous minibatch's update."""
    yield from forward(place, 0, 0)
    i = 0
    while True:
        yield from forward(place, i + 1, 0)
        yield from backward_input(place, i, 0)
        if i:
            yield from backward_weights(place, i - 1, 0)
        i += 1


def test_halves_have_one_update_before_them():
    with pytest.raises(ScheduleError, match=r"input of minibatch 1.*expected update of minib"):
        check_generator(crossing, [Place(0, 1, 4)])
