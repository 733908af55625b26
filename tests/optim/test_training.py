"""Tests the optimizers in training loops next to torch's, and predictions in place."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from helpers import optim_cases as cases
from helpers.interrupting import Interrupts
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import spectrain_ext as st

FLAGS = [(name, flag) for name in cases.OF_TORCH for flag in ("foreach", "fused")]
FLAGS.remove(("NAdam", "fused"))


@cases.every_rival
def test_it_is_a_torch_optimizer_with_the_same_groups(name: str) -> None:
    _, optimizer, reference = cases.pair_of(name, cases.make_params())
    assert isinstance(optimizer, getattr(torch.optim, name))
    assert isinstance(optimizer, st.optim.PredictingOptimizer)
    assert optimizer.defaults == reference.defaults
    assert optimizer.state_dict() == reference.state_dict()
    assert repr(optimizer) == repr(reference)
    model = nn.Linear(3, 2)
    named = cases.made(name, model.named_parameters())
    assert named.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@cases.every_rival
def test_it_takes_torchs_arguments_in_their_order_and_then_its_own(name: str) -> None:
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(made).parameters.values()]
        for made in (getattr(st.optim, name), getattr(torch.optim, name))
    )
    assert ours[: len(theirs)] == theirs
    assert {kind for _, kind, _ in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("lr", (0.25, 0.5, 1, 2, 0.5)),
        ("weight_decay", (1, 2, 0, 0.5)),
        ("maximize", (False, True, 0, 1)),
    ],
)
def test_numbers_of_a_group_may_change_between_steps(name: str, numbers: tuple[float, ...]) -> None:
    params = cases.make_params()
    theirs, optimizer, reference = cases.pair_of("SGD", params)
    for number in numbers:
        for each in (optimizer, reference):
            each.param_groups[0][name] = number
        cases.give_gradients(params, theirs)
        optimizer.step()
        reference.step()
        cases.assert_same(params, theirs)


@cases.every_rival
def test_a_model_of_convolutions_with_a_scheduler_of_rate_and_momentum(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()
    model = model.to(memory_format=torch.channels_last)
    nets, runs, key = (model, copy.deepcopy(model)), [], "momentum" if name == "SGD" else "betas"
    for net, module in zip(nets, (st.optim, torch.optim), strict=True):
        # as a tensor, which schedulers fill
        options = {**cases.OF_TORCH[name], "lr": torch.tensor(0.1, dtype=torch.float64)}
        optimizer = getattr(module, name)(net.parameters(), **options)
        runs.append((net, optimizer, OneCycleLR(optimizer, max_lr=0.2, total_steps=15)))
    for step in range(8):
        x, target = torch.randn(6, 1, 6, 6).double(), torch.randint(3, (6,))
        for net, optimizer, scheduler in runs:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            nn.functional.cross_entropy(net(x), target).backward()
            optimizer.step()
            scheduler.step()
        ours, theirs = (optimizer.param_groups[0] for _, optimizer, _ in runs)
        assert (ours["lr"], ours[key]) == (theirs["lr"], theirs[key])
    assert ours[key] != runs[0][1].defaults[key]
    cases.assert_same(nets[0].parameters(), nets[1].parameters())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_a_gradient_scaler_unscales_and_skips(name: str, flag: str, device: str) -> None:
    p = nn.Parameter(torch.linspace(-1, 1, 8, device=device))
    (q,), _, reference = cases.pair_of(name, [p])
    optimizer = cases.made(name, [p], **{flag: True})
    scalers = [torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2) for _ in "12"]
    for step in range(8):
        factor = float("inf") if step in (0, 4) else 1.0 + step
        for param, opt, scaler in ((p, optimizer, scalers[0]), (q, reference, scalers[1])):
            opt.zero_grad()
            scaler.scale((param**2 * factor).sum()).backward()
            if step == 5:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_([param], 0.5)
            scaler.step(opt)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    cases.assert_same([p], [q])
    assert name == "SGD" or optimizer.state[p]["step"] == 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_experts_have_step_counts_of_their_own(device: str) -> None:
    """Each step has gradients for 8 of 64; each count is a group of its own to the kernel."""
    experts = [nn.Parameter(torch.randn(3, dtype=cases.F64, device=device)) for _ in range(64)]
    twins, ours, theirs = cases.pair_of("AdamW", experts)
    often = torch.arange(1.0, 65.0)
    for _ in range(200):
        chosen = torch.multinomial(often, 8).tolist()
        cases.give_gradients(experts, twins, none=[e for e in range(64) if e not in chosen])
        ours.step()
        theirs.step()
    cases.assert_same(experts, twins)
    counts = [int(ours.state[p]["step"]) for p in experts if p in ours.state]
    assert counts == [int(theirs.state[p]["step"]) for p in twins if p in theirs.state]
    assert len(set(counts)) > 30


@cases.every_rival
def test_hooks_and_closures(name: str) -> None:
    p = nn.Parameter(torch.ones(3).double())
    (q,), *optimizers = cases.pair_of(name, [p])

    def closure(param: nn.Parameter, opt: torch.optim.Optimizer) -> Tensor:
        opt.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    def step() -> None:
        with torch.no_grad():
            pairs = zip((p, q), optimizers, strict=True)
            losses = [opt.step(partial(closure, each, opt)) for each, opt in pairs]
        cases.assert_same(losses[:1], losses[1:])

    ours, calls = optimizers[0], list[Any]()
    for register in (
        *(ours.register_step_pre_hook, ours.register_step_post_hook),
        *(register_optimizer_step_pre_hook, register_optimizer_step_post_hook),
    ):
        handle = register(lambda optimizer, *_: calls.append(optimizer))
        step()
        handle.remove()
        step()
    assert calls == [ours, ours, *optimizers, *optimizers]

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["params"][0].grad.mul_(0.5)

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(halve)
        optimizer.step()
    cases.assert_same([p], [q])


@cases.every_optimizer
def test_memory_is_freed_without_the_collector(name: str) -> None:
    params, optimizer = cases.trained(name)
    cases.give_gradients(params)
    grad = weakref.ref(params[0].grad)
    optimizer.step()
    optimizer.zero_grad()
    assert grad() is None
    with optimizer.predicted(1.0):
        pass
    buffer = weakref.ref(optimizer.state[params[0]][optimizer.stepper.buffer_keys[-1]])
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert buffer() is None
    finally:
        gc.enable()


@cases.every_rival
def test_steps_and_predictions_in_place_reuse_their_launches(name: str) -> None:
    """Each made the other's anew, nine times as slow for 50 small parameters."""
    params, optimizer = cases.trained(name)
    seen = []
    for _ in range(4):
        with optimizer.predicted(1):
            pass
        cases.give_gradients(params)
        optimizer.step()
        seen.append([rows for each in optimizer.stepper._resolved.values() for rows in each.rows])
    assert all(a is b for a, b in zip(seen[2], seen[3], strict=True))


# Predictions in place: predict_, restore_ and predicted


@pytest.mark.parametrize("steps", [0, st.laws.Geometric(0)], ids=str)
def test_where_nothing_is_predicted_no_pass_is_made(steps: st.laws.Horizon) -> None:
    """Nothing is restored either: a graph of the weights survives the block."""
    params, optimizer = cases.trained(dtype=torch.float32)
    with optimizer.predicted(steps):
        loss = torch.stack([(p * p).sum() for p in params]).sum()
        inside = [p._version for p in params]
    assert [p._version for p in params] == inside
    loss.backward()


@pytest.mark.parametrize("ends", ["left", "raised"])
def test_a_model_is_not_saved_while_its_weights_are_predicted(ends: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = st.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    kept = cases.bits(model.parameters())
    saves = (
        lambda: model.state_dict(),
        lambda: model[2].state_dict(),
        lambda: torch.save(model, io.BytesIO()),
        lambda: copy.deepcopy(model),
    )
    with suppress(ZeroDivisionError), optimizer.predicted(2):
        for save in saves:
            with pytest.raises(RuntimeError, match="leave the block of predicted"):
                save()
        assert model[0].weight.detach().sum() == model[0].weight.sum()
        if ends == "raised":
            raise ZeroDivisionError
    cases.assert_bits(model.parameters(), kept)
    for save in saves:
        save()
    assert all(not vars(p) for p in model.parameters())


def test_weights_that_were_predicted_are_not_kept_alive() -> None:
    model = nn.Linear(4, 2)
    optimizer = st.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    with optimizer.predicted(2):
        model(torch.randn(3, 4)).sum().backward()
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_a_backward_across_predict_or_restore_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = st.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    before = model(torch.randn(3, 4)).sum()
    with optimizer.predicted(1):
        inside = model(torch.randn(3, 4)).sum()
        with pytest.raises(RuntimeError, match="inplace"):
            before.backward()
    with pytest.raises(RuntimeError, match="inplace"):
        inside.backward()


def test_restore_reaches_parameters_that_moved_meanwhile() -> None:
    params, optimizer = cases.trained()
    kept = cases.bits(params)
    optimizer.predict_(2)
    for p in params:
        p.data = p.data.clone()
    optimizer.restore_()
    cases.assert_bits(params, kept)


def _interrupted_at(n: int, work: Callable[[], None]) -> bool:
    """Run work; raise KeyboardInterrupt at the n-th line inside the package, counted from 0."""
    try:
        with Interrupts(n):
            work()
    except KeyboardInterrupt:
        return True
    return False


def _is_predicted(optimizer: Any) -> bool:
    try:
        copy.deepcopy(optimizer)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("twice", [False, True])
def test_an_interrupt_at_any_line_leaves_the_true_weights_or_says_so(twice: bool) -> None:
    params = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3).double())]
    optimizer = st.optim.SGD(params, lr=0.1, momentum=0.9)
    cases.give_gradients(params)
    optimizer.step()
    true = cases.bits(params)

    def work() -> None:
        with optimizer.predicted(2.0):
            pass

    n = 0
    while _interrupted_at(n, work):
        for m in (1, 5, 10, 20) if twice else ():
            if _is_predicted(optimizer):
                _interrupted_at(m, optimizer.restore_)
        if _is_predicted(optimizer):
            with pytest.raises(RuntimeError, match="restore_"):
                optimizer.step()
            optimizer.restore_()
        cases.assert_bits(params, true)
        n += 1
    cases.assert_bits(params, true)
    assert n > 50
