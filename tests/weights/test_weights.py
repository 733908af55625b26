"""Tests StageWeights: flat buffers, and which of them holds which version when."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from spectrain_ext.method import Method, rules_at
from spectrain_ext.optim import SGD
from spectrain_ext.schedule import Place
from spectrain_ext.weights import StageWeights
from spectrain_ext.weights.storage import ALIGNMENT, Flat


def made(
    module=None,
    *,
    window=3,
    forward=0,
    backward="current",
    back=0,
    lr=0.1,
    scheduler=None,
    microbatches=1,
    momentum_dtype=None,
    **more,
):
    torch.manual_seed(0)
    module = module or nn.Linear(3, 2)
    optimizer = SGD(
        [p for p in module.parameters() if p.requires_grad],
        lr=lr,
        momentum=0.9,
        momentum_dtype=momentum_dtype,
    )
    counted = forward == "counted"
    method = Method(
        "own",
        "for tests",
        forward_horizon=forward if counted else lambda place: forward,
        backward=backward,
        backward_horizon=lambda place: back,
        **more,
    )
    place = Place(0, window, window, microbatches)
    weights = StageWeights(
        module,
        optimizer,
        scheduler and scheduler(optimizer),
        rules_at(method, place),
        (place, place),
        method.schedule,
    )
    weights.bind()
    weights.begin()
    return weights


def step(weights, *, forward=None):
    for p in weights.params:
        p.grad = torch.ones_like(p)
    weights.step(weights.versions.begin_update(forward, rates_move=weights.rates_move))


def holds(weights, content):
    """Return whether a buffer already holds the version."""
    return weights.versions.find(content) is not None


def load(weights, content):
    """Load the version for computing."""
    buffer = weights.versions.find(content)
    if buffer is None:
        buffer = weights.versions.room(content)
        weights.storage.write(content, buffer)
    weights.storage.point(buffer)


def bound(weights):
    return torch.cat([p.detach().flatten() for p in weights.params])


def true(weights):
    return torch.cat([weights.true_weights()[p].flatten() for p in weights.params])


def predicted(weights, steps):
    momentum = [weights.optimizer.state[p]["momentum_buffer"].flatten() for p in weights.params]
    lr = weights.optimizer.param_groups[0]["lr"]
    return torch.addcmul(true(weights), torch.cat(momentum), torch.tensor(1.0), value=-lr * steps)


def test_flat_layout():
    params = [
        torch.randn(3, 5),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(7, 2).t(),
        torch.randn(4, dtype=torch.bfloat16),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(4, 6)[:, ::2],
        torch.randn(5, dtype=torch.bfloat16),
    ]
    flat = Flat(params)
    assert [b.dtype for b in flat.buffers] == [torch.float32, torch.bfloat16]
    ranges = []
    for p in params:
        view = flat.views[p]
        assert (view.shape, view.dtype) == (p.shape, p.dtype)
        if p.numel():
            assert view.data_ptr() % ALIGNMENT == 0
            end = view.data_ptr() + view.numel() * view.element_size()
            ranges.append((view.data_ptr(), end))
            buffer = next(b for b in flat.buffers if b.dtype == p.dtype)
            assert buffer.data_ptr() <= view.data_ptr()
            assert end <= buffer.data_ptr() + buffer.nbytes
    ranges.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    for p in params[:6]:
        assert flat.views[p].stride() == p.stride()
    assert flat.views[params[6]].stride() == (3, 1)  # dense, where the parameter was not
    assert flat.nbytes == sum(b.nbytes for b in flat.buffers)
    wide = Flat(params, lambda p: torch.float32)
    assert len(wide.buffers) == 1
    assert wide.views[params[3]].dtype == torch.float32


def test_parameters_become_views_and_get_their_own_storage_back():
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.Linear(4, 2)
    )
    module[1].bias.requires_grad_(False)
    frozen = module[1].bias.data_ptr()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    strides = module[0].weight.stride()
    weights = made(module)
    storages = {p.untyped_storage().data_ptr() for p in weights.params}
    assert len(storages) == 1
    assert len(weights.params) == 3
    assert module[1].bias.data_ptr() == frozen
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        assert p.is_leaf
    assert module[0].weight.stride() == strides
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    step(weights)
    after = {name: p.detach().clone() for name, p in module.named_parameters()}
    weights.unbind()
    assert not weights.bound
    assert weights.nbytes == 0
    assert len({p.untyped_storage().data_ptr() for p in weights.params}) == 3
    assert module[0].weight.stride() == strides
    for name, p in module.named_parameters():
        assert torch.equal(p, after[name])
        if p.requires_grad:
            assert p.untyped_storage().nbytes() == p.nbytes


def test_a_master_exists_only_where_others_are_computed_with():
    one = made().nbytes
    assert made(backward="stash", window=1).nbytes == one
    assert made(forward=2, backward="predict", back=0).nbytes == 2 * one  # a forward's, the master
    assert made(forward=2, backward="predict", back=1).nbytes == 2 * one  # one that is overwritten
    assert made(forward=2, backward="predict", back=1, microbatches=2).nbytes == 3 * one
    assert made(backward="stash", window=3).nbytes == 3 * one
    assert made(forward=2, backward="stash", window=3).nbytes == 4 * one  # and a master


def test_loads_of_what_is_there_do_nothing():
    weights = made(forward=1, backward="predict", back=1)
    assert not holds(weights, weights.versions.for_forward(0, 0))
    load(weights, weights.versions.for_forward(0, 0))
    assert holds(weights, weights.versions.for_forward(1, 0))
    assert holds(weights, weights.versions.for_backward(0, 0))
    step(weights, forward=(3, 0))
    assert holds(weights, weights.versions.for_forward(2, 0))
    assert holds(weights, weights.versions.for_backward(1, 0))
    step(weights)
    assert not holds(weights, weights.versions.for_backward(2, 0))


def test_a_forward_and_a_backward_have_a_buffer_each():
    weights = made(forward=3, backward="predict", back=1, microbatches=2)
    step(weights, forward=(1, 0))
    for j in range(2):
        content = weights.versions.for_forward(1, j)
        assert holds(weights, content)
        load(weights, content)
        torch.testing.assert_close(bound(weights), predicted(weights, 3))
        content = weights.versions.for_backward(1, j)
        assert holds(weights, content) == (j == 1)
        load(weights, content)
        torch.testing.assert_close(bound(weights), predicted(weights, 1))
    assert len(weights.storage.pool) == 2


def test_a_backward_without_a_prediction_has_the_master_itself():
    weights = made(forward=3, backward="predict", back=0)
    step(weights, forward=(1, 0))
    load(weights, weights.versions.for_backward(0, 0))
    assert weights.storage.bound is weights.storage.master
    assert weights.storage.in_place()
    weights.check(0)
    weights.end()
    assert weights.storage.bound is weights.storage.home
    weights.check(0)


def test_the_step_writes_what_a_load_would_write():
    fused, plain = (made(forward=3, backward="predict", back=1) for _ in range(2))
    for _ in range(3):
        step(fused, forward=(3, 0))
        step(plain)
        load(plain, plain.versions.for_forward(0, 0))
        assert torch.equal(bound(fused), bound(plain))
        assert torch.equal(true(fused), true(plain))
        assert not torch.equal(true(fused), bound(fused))
        torch.testing.assert_close(bound(fused), predicted(fused, 3))
        for weights in (fused, plain):
            load(weights, weights.versions.for_backward(0, 0))
            torch.testing.assert_close(bound(weights), predicted(weights, 1))
    fused.end()
    assert torch.equal(bound(fused), true(fused))


def test_horizon_0_loads_the_bits_of_the_true_weights():
    weights = made(forward=2, backward="predict", back=0)
    step(weights, forward=(3, 0))
    load(weights, weights.versions.for_backward(0, 0))
    assert torch.equal(bound(weights), true(weights))


@pytest.mark.parametrize("forward", [0, 2])
def test_stashed_versions_come_back_bit_for_bit(forward):
    weights = made(forward=forward, backward="stash", window=3)
    seen = {}
    size = weights.nbytes

    def run_forward(i):
        content = weights.versions.for_forward(i, 0)
        load(weights, content)
        seen[i] = bound(weights).clone()

    for i in range(3):
        run_forward(i)
    for i in range(12):
        content = weights.versions.for_backward(i, 0)
        load(weights, content)
        assert torch.equal(bound(weights), seen[i])
        step(weights, forward=(i + 3, 0) if i < 9 else None)
        if i < 9:
            run_forward(i + 3)
    assert weights.nbytes == size
    assert not torch.equal(seen[2], seen[11])


def test_weights_of_a_minibatch_outlive_an_update_that_comes_between_its_forwards():
    weights = made(forward=0, backward="predict", back=1, once=True, microbatches=2)
    size = weights.nbytes
    load(weights, weights.versions.for_forward(0, 0))
    first = bound(weights).clone()
    step(weights)
    assert not torch.equal(true(weights), first)
    load(weights, weights.versions.for_forward(0, 1))
    assert torch.equal(bound(weights), first)
    load(weights, weights.versions.for_forward(1, 0))
    assert torch.equal(bound(weights), true(weights))
    assert weights.nbytes == size


def test_a_learning_rate_that_changes_is_met_by_the_next_load():
    weights = made(forward=2, backward="predict", back=1)
    step(weights, forward=(3, 0))
    assert holds(weights, weights.versions.for_forward(0, 0))
    weights.optimizer.param_groups[0]["lr"] = 0.3
    assert not holds(weights, weights.versions.for_forward(0, 0))
    load(weights, weights.versions.for_forward(0, 0))
    torch.testing.assert_close(bound(weights), predicted(weights, 2))


def test_under_a_moving_learning_rate_the_step_does_not_predict_in_vain():
    def decay(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)

    weights = made(forward=2, backward="predict", back=1, scheduler=decay)
    held = []
    for _ in range(8):
        step(weights, forward=(3, 0))
        content = weights.versions.for_forward(0, 0)
        held.append(holds(weights, content))
        load(weights, content)
        torch.testing.assert_close(bound(weights), predicted(weights, 2))
    # A load uses the change after the 4th step, and the 5th step still expects another.
    assert held == [True, True, True, False, False, True, True, False]


def test_a_hook_that_changes_the_learning_rate_in_the_step():
    weights = made(forward=2, backward="predict", back=1)

    def halve(optimizer, *_):
        optimizer.param_groups[0]["lr"] /= 2

    weights.optimizer.register_step_post_hook(halve)
    step(weights, forward=(3, 0))
    assert not holds(weights, weights.versions.for_forward(0, 0))


def test_parameters_without_a_gradient():
    weights = made(forward=2, backward="predict", back=1)
    step(weights)
    weights.params[0].grad = torch.ones_like(weights.params[0])
    weights.step(weights.versions.begin_update((3, 0)))  # no gradient for the bias
    torch.testing.assert_close(bound(weights), predicted(weights, 2))
    assert all(p.grad is None for p in weights.params)


def test_a_failed_step_leaves_no_order_behind():
    weights = made(forward=2, backward="predict", back=1)

    def fail(*_):
        raise ArithmeticError

    handle = weights.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        step(weights, forward=(3, 0))
    handle.remove()
    weights.end()
    weights.begin()
    before = true(weights).clone()
    assert torch.equal(bound(weights), before)
    load(weights, weights.versions.for_backward(0, 0))
    step(weights, forward=None)
    assert not torch.equal(true(weights), before)
    assert torch.equal(bound(weights), before)  # the step wrote no prediction without an order


def test_momentum_lives_in_a_flat_buffer_of_its_dtype():
    module = nn.Linear(3, 2).bfloat16()
    weights = made(module, window=2, forward=1, momentum_dtype=torch.float32)
    optimizer = weights.optimizer
    step(weights)
    buffers = [optimizer.state[p]["momentum_buffer"] for p in weights.params]
    assert {b.dtype for b in buffers} == {torch.float32}
    assert len({b.untyped_storage().data_ptr() for b in buffers}) == 1


def test_a_graph_from_before_the_run_does_not_meet_the_new_weights_unnoticed():
    weights = made(nn.Linear(2, 2))
    out = weights.module(torch.ones(1, 2, requires_grad=True)).sum()
    weights.begin()
    step(weights)
    weights.end()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("how", ["to", "assign", "data"])
def test_a_parameter_that_left_the_buffer(how):
    weights = made()
    weights.check(4)
    module = weights.module
    if how == "to":
        module.to(torch.float64)
    elif how == "assign":
        module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    else:
        module.weight.data = module.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"stages\[4\]: parameter 'weight' left .* flat buffer"):
        weights.check(4)
