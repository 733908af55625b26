"""Tests a stage's weights: their memory, the versions, the predictions; and learning rates."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers.pipeline_cases import Compared, batches, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from helpers.random_modules import Function
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import spectrain_ext as st
from spectrain_ext.method import find_method

AUTO = find_method("auto")
ALIGNMENT = 256  # bytes: for vector loads and matrix libraries


class Layouts(nn.Module):
    """Adds the sum of parameters of many layouts and two dtypes."""

    def __init__(self, last):
        super().__init__()
        made = [
            torch.randn(3, 5),
            torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
            torch.randn(7, 2).t(),
            torch.randn(4, dtype=torch.bfloat16),
            torch.randn(()),
            torch.randn(0, 3),
            torch.randn(5, dtype=torch.bfloat16),
            last,
        ]
        self.each = nn.ParameterList(nn.Parameter(p) for p in made)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x):
        return x + sum(p.sum() for p in self.each).to(x.dtype) + self.frozen.sum()


def storages(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_parameters_are_views_of_flat_buffers_until_their_release():
    module = Layouts(torch.randn(4, 6)[:, ::2])
    params, pointer = list(module.each), module.frozen.data_ptr()
    before = [(p.detach().clone(), p.stride()) for p in params]
    pipe = st.Pipeline([module], sgd(), mse, "vanilla", master_dtype=torch.float32)
    assert len(storages(params)) == 2  # one for each dtype
    masters = pipe.masters()
    assert len(masters) == 2 and {master.dtype for master in masters.values()} == {torch.float32}
    ranges = []
    for p, (value, stride) in zip(params, before, strict=True):
        assert torch.equal(p, value) and p.is_leaf
        assert p.stride() == (stride if p is not params[-1] else (3, 1))  # it was not dense
        if p.numel():
            assert p.data_ptr() % ALIGNMENT == 0
            ranges.append((p.data_ptr(), p.data_ptr() + p.nbytes))
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(ranges)))
    losses(pipe, batches(1))
    state = [pipe.optimizers[0].state[p]["momentum_buffer"] for p in params]
    assert len(storages(state)) == 2
    after = [p.detach().clone() for p in params]
    pipe.release()
    assert pipe.weight_version_bytes == 0
    assert module.frozen.data_ptr() == pointer
    for p, value, (old, _) in zip(params, after, before, strict=True):
        assert torch.equal(p, value) and p.untyped_storage().nbytes() == p.nbytes
        assert not p.numel() or not torch.equal(p, old)


# What a backward finds, whatever else a stage saves


def run_again(x, module):
    """A forward that runs again in its backward."""
    return checkpoint(module, x, use_reentrant=False)


def modified(x, layer):
    """Changes a saved tensor in place."""
    y = layer(x).exp()
    found = y * 2
    y.add_(1)
    return found


def trained(stages, data, method="spectrain"):
    # With one microbatch a later stage's backward overwrites.
    pipe = st.Pipeline(stages, sgd(), mse, method, microbatches=2)
    return [*losses(pipe, data), *pipe.parameters()]


@pytest.mark.parametrize("method", ["spectrain", "lwp-w"])
def test_a_part_that_runs_again_meets_the_backwards_weights(method):
    """Using the forward's weights except in the checkpoint would mix two computations.

    A checkpointed part gets all its activations from the backward's weights. This equals the
    definition if the activations do not depend on the weights, as in a stage of one linear layer.
    """
    stages, data = [nn.Linear(5, 5) for _ in range(4)], batches(8, size=4)
    plain = trained(copy.deepcopy(stages), data, method)
    again = trained([Function(run_again, stage) for stage in stages], data, method)
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
        trained([Function(modified, nn.Linear(5, 5)), *tanh_stages(2)], batches(4, size=4), method)
    assert (raised.value.stage, raised.value.action) == (0, "backward")


# Predictions that a step writes in the same pass


class Counting(st.optim.SGD):
    """Counts steps that also write a prediction, and predictions that are written alone."""

    def __init__(self, params, counts):
        super().__init__(params, lr=0.05, momentum=0.9)
        stepper = self.stepper
        step, predict = stepper.step, stepper.predict

        def counted_step(factor=1.0, write=None, **more):
            step(factor, write, **more)
            counts["with a step"] += write is not None

        def counted_predict(*arguments):
            counts["alone"] += 1
            predict(*arguments)

        stepper.step, stepper.predict = counted_step, counted_predict


def counted(method, hook=None, dtype=torch.float64, **more):
    """Train 12 minibatches; return each stage's (steps with a prediction, predictions alone)."""
    made = [Counter() for _ in range(3)]
    numbers, stages = iter(made), [stage.to(dtype) for stage in tanh_stages(3)]
    more.setdefault("microbatches", 1)
    pipe = st.Pipeline(stages, lambda p: Counting(p, next(numbers)), mse, method, **more)
    for optimizer in pipe.optimizers if hook else ():
        optimizer.register_step_post_hook(hook)
    losses(pipe, [(x.to(dtype), y.to(dtype)) for x, y in batches(12)])
    return [(each["with a step"], each["alone"]) for each in made]


def halve(optimizer, *_):
    optimizer.param_groups[0]["lr"] /= 2


WIDE = {"dtype": torch.bfloat16, "master_dtype": torch.float32}
EVERY_FOURTH = {"scheduler": lambda optimizer: StepLR(optimizer, 4, 0.5)}


@pytest.mark.parametrize(
    ("method", "more", "expected"),
    [
        # Stage 0 fills the pipeline with one prediction; its last two steps have no next forward.
        ("spectrain", {}, [(10, 1), (11, 1), (12, 1)]),
        # Before the third forward of stage 0 there is an update, but no step of its own.
        ("spectrain-local", {}, [(10, 2), (11, 1), (0, 0)]),
        # These laws need the step's gradient.
        ("second-order", {}, [(12, 0)] * 3),
        ("auto", EVERY_FOURTH, [(12, 0)] * 3),
        ("lwp-w", {}, [(0, 0)] * 3),
        ("vanilla", WIDE, [(10, 0), (11, 0), (12, 0)]),  # rounds, where a master is wider
        ("xpipe", {"microbatches": 2}, [(11, 13), (0, 23), (12, 1)]),
        # A rate that has just changed is met by a load; the next step still expects a change.
        ("spectrain", EVERY_FOURTH, [(8, 5), (9, 5), (10, 5)]),
        ("spectrain", {"hook": halve}, [(10, 10), (11, 11), (12, 12)]),
    ],
)
def test_a_step_writes_the_next_forwards_weights_where_it_can(method, more, expected):
    assert counted(method, **more) == expected


def test_a_step_of_a_subclass_or_a_wrapper_is_called_and_still_predicts():
    calls = Counter()

    class Own(st.optim.SGD):
        def step(self, closure=None):
            calls["own"] += 1
            return super().step(closure)

    class Wrapped(st.optim.SGD):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            real = self.step

            def step(closure=None):
                calls["wrapped"] += 1
                return real(closure)

            self.step = step

    stages, data, found = tanh_stages(3), batches(6), []
    for kind in (st.optim.SGD, Own, Wrapped):
        make = partial(kind, lr=0.05, momentum=0.9)
        pipe = st.Pipeline(copy.deepcopy(stages), make, mse, "spectrain")
        found.append(losses(pipe, data))
    assert found[0] == found[1] == found[2]
    assert calls == {"own": 18, "wrapped": 18}


@pytest.mark.parametrize("method", ["spectrain", "spectrain-stash", "pipemare", "auto"])
def test_a_step_that_a_subclass_leaves_out_still_predicts(method):
    def skipping(params, kind):
        class Skipping(kind):
            steps = 0

            def step(self, closure=None):
                self.steps += 1
                return super().step(closure) if self.steps % 3 else None

        return Skipping(params, lr=0.05, momentum=0.9)

    makes = [partial(skipping, kind=kind) for kind in (st.optim.SGD, torch.optim.SGD)]
    compared = Compared(tanh_stages(3), method, optimizer=makes, microbatches=1)
    if method != "auto":
        compared.run(batches(12))
        return
    with pytest.raises(st.StageError, match=r"has not called super\(\).step\(\), and SecondOrder"):
        compared.run(batches(12))


def test_a_failed_step_leaves_no_order_behind():
    counts = Counter()
    make = partial(Counting, counts=counts)
    pipe = st.Pipeline(tanh_stages(3), make, mse, "spectrain", microbatches=1)

    def fail(*_):
        raise ArithmeticError

    handle = pipe.optimizers[0].register_step_pre_hook(fail)
    with pytest.raises(st.StageError, match="stage 0"):
        losses(pipe, batches(4))
    handle.remove()
    counts.clear()
    losses(pipe, batches(1))
    assert counts["with a step"] == 1  # the last stage's


def test_a_hook_that_changes_the_learning_rate_in_a_step():
    def hooked(params, kind):
        optimizer = kind(params, lr=0.05, momentum=0.9)
        optimizer.register_step_post_hook(halve)
        return optimizer

    makes = [partial(hooked, kind=kind) for kind in (st.optim.SGD, torch.optim.SGD)]
    Compared(tanh_stages(3), "spectrain", optimizer=makes).run(batches(8))


def test_a_graph_from_before_a_run_does_not_meet_the_new_weights_unnoticed():
    stages = tanh_stages(2)
    pipe = st.Pipeline(stages, sgd(), mse)
    out = stages[0](torch.ones(1, 5, requires_grad=True)).sum()
    losses(pipe, batches(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# Learning rates with a factor of the method, which the parameter groups never show


def made(stages, make, method):
    return st.Pipeline(copy.deepcopy(stages), make, mse, method, microbatches=1)


def rates(pipe):
    return [group["lr"] for each in pipe.optimizers for group in each.param_groups]


@pytest.mark.parametrize(
    "make",
    [
        partial(st.optim.Muon, lr=0.02, adamw={"lr": 0.01}),
        partial(torch.optim.Adam, lr=torch.tensor(0.05)),
    ],
    ids=["two groups", "tensor"],
)
def test_a_factor_is_as_good_as_other_rates(make):
    """Bit for bit; the caller may set rates between runs, and sees only them."""
    plain, factor = replace(AUTO, rates=None), AUTO.rates
    stages = tanh_stages(4)
    other, pipe = made(stages, make, plain), made(stages, make, "auto")
    assert pipe.schedulers == ()
    for rate in (None, 0.01):
        for place, mine, theirs in zip(pipe.places, pipe.optimizers, other.optimizers, strict=True):
            for group, twin in zip(mine.param_groups, theirs.param_groups, strict=True):
                group["lr"] = group["lr"] if rate is None else rate
                twin["lr"] = group["lr"] * factor(place, 0)
        before, data = rates(pipe), batches(8)
        assert factor(pipe.places[0], 0) < 1
        assert all(map(torch.equal, losses(pipe, data), losses(other, data)))
        assert all(a is b for a, b in zip(rates(pipe), before, strict=True))
    assert all(map(torch.equal, pipe.parameters(), other.parameters()))


def test_the_rate_comes_back_after_a_failed_step_and_hooks_may_set_it():
    seen, fails = [], []

    class Sgd(torch.optim.SGD):
        def step(self):
            seen.append(self.param_groups[0]["lr"])
            if fails:
                raise ArithmeticError
            super().step()

    def warm_up(optimizer, *_):
        optimizer.param_groups[0]["lr"] = 0.5

    pipe = made(tanh_stages(3), partial(Sgd, lr=0.25), "auto")
    factors = [AUTO.rates(place, 0) for place in pipe.places]
    losses(pipe, batches(2))
    assert sorted(seen) == sorted(0.25 * factor for factor in factors * 2)
    fails.append(True)
    with pytest.raises(st.StageError):
        losses(pipe, batches(2))
    assert rates(pipe) == [0.25] * 3
    fails.clear()
    seen.clear()
    for each in pipe.optimizers:
        each.register_step_pre_hook(warm_up)
    losses(pipe, batches(2))
    assert sorted(seen) == sorted(0.5 * factor for factor in factors * 2)
    assert rates(pipe) == [0.5] * 3
    for each in pipe.optimizers:  # outside of a run nothing is divided
        each.step()
    assert set(seen[-3:]) == {0.5}


def test_a_factor_needs_a_rate():
    def bare(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.param_groups[0]["lr"] = None
        return optimizer

    with pytest.raises(ValueError, match=r"group 0 of the SGD of stages\[0\] has no 'lr'"):
        made(tanh_stages(3), bare, "auto")
