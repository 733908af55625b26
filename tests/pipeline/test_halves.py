"""Tests halves of backwards: inner, because gradients show only there which half made them."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from helpers.foreign_optimizers import FOREIGN
from helpers.pipeline_cases import (
    batches,
    float64,  # noqa: F401  # a fixture
    mse,
    sgd,
    tanh_stages,
)
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spectrain_ext as st
from spectrain_ext.method import find_method
from spectrain_ext.pipeline.halves import differentiate_inputs
from spectrain_ext.pipeline.tape import differentiate
from spectrain_ext.schedule import (
    Place,
    ScheduleError,
    backward_input,
    backward_weights,
    find_generator,
    forward,
)
from spectrain_ext.simulation import check_generator


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


def layered(*layers):
    return nn.Sequential(nn.Unflatten(1, (2, 4)), *layers, nn.Flatten())


# Modules of the stage, and the number of parameters with gradients after the first half.
CASES = {
    "layers": (nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 8)), 0),
    "convolutions": (
        layered(nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Conv1d(3, 2, 1)),
        0,
    ),
    "group norm": (layered(nn.Conv1d(2, 2, 1), nn.GroupNorm(2, 2), nn.Conv1d(2, 2, 1)), 2),
    "attention": (
        layered(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)),
        0,
    ),
    "normed": (weight_norm(nn.Linear(8, 8)), 0),
    "nothing": (nn.Identity(), 0),
    "twice": (Module(lambda m, x: m.layer(m.other(m.layer(x)).tanh() * m.vector)), 2),
    "a weight that weights meet": (Module(lambda m, x: (x * m.vector.exp()) @ m.layer.weight), 0),
    "beside the input": (Module(lambda m, x: (m.layer(x), m.vector.exp() * 2)), 0),
    "beside and with it": (Module(lambda m, x: (m.layer(x), m.layer.weight.exp())), 1),
    "not at all": (Module(lambda m, x: (m.layer(m.vector), x.detach() * m.vector)), 0),
    "without a gradient": (Module(lambda m, x: (m.layer(x), x.detach())), 0),
    "in Python": (Module(lambda m, x: m.layer(Doubled.apply(m.other(x), m.vector))), 1),
    "checkpointed": (
        Module(lambda m, x: m.other(checkpoint(m.layer, x, use_reentrant=False))),
        0,
    ),
    "reentrantly": (Module(lambda m, x: m.other(checkpoint(m.layer, x, use_reentrant=True))), 4),
}


def gradients(module, halves, leaf=True):
    """Return all gradients, and the number of parameter gradients after the first half."""
    module = copy.deepcopy(module)
    torch.manual_seed(3)
    x = torch.randn(6, 8).requires_grad_(leaf)
    out = module(x)
    outputs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    pairs = [(o, torch.randn_like(o)) for o in outputs]
    if halves:
        rest = differentiate_inputs(pairs, [x if leaf else None])
        at_once = sum(p.grad is not None for p in module.parameters())
        if rest is not None:
            rest()
    else:
        differentiate(pairs)
        at_once = None
    return at_once, [x.grad, *(p.grad for p in module.parameters())]


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("name", CASES)
def test_the_same_gradients(name):
    module, at_once = CASES[name]
    module = module.to(torch.float64)
    found, expected = gradients(module, True), gradients(module, False)
    assert found[0] == at_once
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("name", CASES)
def test_without_a_gradient_of_the_input_all_of_it_is_put_off(name):
    module = CASES[name][0].to(torch.float64)
    found, expected = gradients(module, True, leaf=False), gradients(module, False, leaf=False)
    assert found[0] == 0
    assert_same(found[1], expected[1])


@pytest.mark.compiler
def test_compiled_parts_have_all_at_once():
    torch._dynamo.reset()  # after many compilations in one process, dynamo compiles no more
    torch.manual_seed(0)
    module = Module(lambda m, x: m.other(torch.compile(m.layer, backend="aot_eager")(x)))
    found, expected = gradients(module, True), gradients(module, False)
    assert found[0] == 4
    assert_same(found[1], expected[1])


def test_no_work_is_done_twice():
    """Each half computes half of the matrix products of a whole backward."""
    stage = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(8, 8), nn.Tanh())))
    x = torch.randn(4, 8, requires_grad=True)

    def counted(work, *arguments):
        with FlopCounterMode(display=False) as flops:
            found = work(*arguments)
        return flops.get_total_flops(), found

    whole, _ = counted(differentiate, [(stage(x), torch.randn(4, 8))])
    first, rest = counted(differentiate_inputs, [(stage(x), torch.randn(4, 8))], [x])
    second, _ = counted(rest)
    assert whole == 2 * 5 * 2 * 4 * 8 * 8
    assert first == second == whole // 2


def test_hooks_see_what_they_see_of_a_whole_backward():
    """A hook that changes a gradient changes it once; parameter hooks are called once."""

    def run(halves):
        torch.manual_seed(0)
        seen = []
        stage = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        stage[0].register_full_backward_hook(lambda m, i, o: seen.append("module"))
        stage[1].weight.register_hook(lambda g: g * 2)
        stage[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("parameter"))
        x = torch.randn(4, 8, requires_grad=True)
        between = stage[0](x)
        between.register_hook(lambda g: g * 3)
        pairs = [(stage[1](between), torch.randn(4, 8))]
        if halves:
            differentiate_inputs(pairs, [x])()
        else:
            differentiate(pairs)
        return sorted(seen), [x.grad, *(p.grad for p in stage.parameters())]

    (seen, found), (all_seen, expected) = run(True), run(False)
    assert all(map(torch.equal, found, expected))
    assert seen == all_seen == ["module", "parameter"]


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_whose_data_had_another_dtype_in_between(name):
    """Torch then gives it a new gradient accumulator, which is not in the graph."""

    def run(halves):
        module = copy.deepcopy(CASES[name][0]).to(torch.float64)
        torch.manual_seed(3)
        x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
        out = module(x)
        outputs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        pairs = [(o, torch.ones_like(o)) for o in outputs]

        def change():
            for p in module.parameters():
                data, p.data = p.data, p.data.half()
                p.data = data

        change()
        rest = differentiate_inputs(pairs, [x]) if halves else differentiate(pairs)
        change()
        if rest is not None:
            rest()
        return [x.grad, *(p.grad for p in module.parameters())]

    assert_same(run(True), run(False))


def test_nothing_is_left_of_it():
    """It needs no garbage collection."""
    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    saved = []

    def keep(tensor):
        held = Held(tensor.detach())
        saved.append(weakref.ref(held))
        return held

    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
            rest = differentiate_inputs([(stage(x), torch.randn(4, 8))], [x])
        assert any(held() is not None for held in saved)
        rest()
        del rest
        assert len(saved) >= 3
        assert all(held() is None for held in saved)
    finally:
        gc.enable()


class Held:
    """A saved tensor that can be watched."""

    def __init__(self, tensor):
        self.tensor = tensor


# In pipelines


def trained(method, n=3, m=1, make=tanh_stages, last=2, **more):
    torch.manual_seed(5)
    data = batches(7, size=5, last=last)
    torch.manual_seed(7)
    pipe = st.Pipeline(make(n), sgd(), mse, method, microbatches=m, **more)
    losses = [result.loss for result in pipe.run(data)]
    return [*losses, *(p.detach() for p in pipe.parameters())]


def in_bfloat16(method, optimizer, m):
    """Train bfloat16 stages with float32 masters; return all bits, and the gradients by stage."""
    torch.manual_seed(5)
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(8, size=4)]
    stages, counts = [stage.bfloat16() for stage in tanh_stages(4)], [0] * 4
    for k, stage in enumerate(stages):

        def count(_, k=k):
            counts[k] += 1

        stage[0].weight.register_post_accumulate_grad_hook(count)
    pipe = st.Pipeline(stages, optimizer, mse, method, microbatches=m, master_dtype=torch.float32)
    losses = [result.loss for result in pipe.run(data)]
    return [*losses, *(p.detach() for p in pipe.parameters()), *pipe.masters().values()], counts


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("name", ["AdamW", "Muon", "Replacing"])
def test_updates_between_the_halves_on_wider_masters(name, m):
    """During a step of another package's optimizer, parameters have their masters' dtype."""
    difference = st.spectrain(law="difference")
    own = replace(difference, name="own", schedule="zb-h1-async")
    for halves, whole in (("zb-h1-async", "auto"), (own, difference)):
        found, counts = in_bfloat16(halves, FOREIGN[name], m)
        expected, _ = in_bfloat16(whole, FOREIGN[name], m)
        assert all(map(torch.equal, found, expected))
        assert counts == [8 * m] * 4


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
    assert all(map(torch.equal, trained(halves, 3), trained(whole, 3)))


def mixed(place):
    """Whole backwards on stage 0, and halves elsewhere."""
    return find_generator("zb-h1" if place.stage else "1f1b")(place)


def test_halves_on_some_stages():
    own = st.Method("own", "", mixed, window=lambda k, n, m: n)
    assert all(map(torch.equal, trained(own, 3, 4), trained("1f1b", 3, 4)))


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
