"""Tests Adam, AdamW and NAdam as torch.optim.Optimizers: schedulers, hooks, scalers, errors."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    ADAMS,
    assert_bits,
    assert_same,
    assert_same_state,
    bits,
    every_adam,
    give_gradients,
    make_params,
    pair_of,
    states,
    twins,
)
from torch import Tensor, nn

import spectrain_ext as st

FLAGS = [(name, "foreach") for name in ADAMS] + [("Adam", "fused"), ("AdamW", "fused")]


@every_adam
def test_it_is_a_torch_optimizer_with_the_same_groups(name: str) -> None:
    params = make_params()
    _, optimizer, reference = pair_of(name, params)
    assert isinstance(optimizer, getattr(torch.optim, name))
    assert isinstance(optimizer, st.optim.PredictingOptimizer)
    assert optimizer.defaults == reference.defaults
    assert optimizer.state_dict() == reference.state_dict()
    assert repr(optimizer) == repr(reference)


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_implementation_flags_have_no_effect(name: str, flag: str) -> None:
    ours = make_params()
    theirs = twins(ours)
    optimizer = getattr(st.optim, name)(ours, **{flag: True})
    reference = getattr(st.optim, name)(theirs)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_bits(ours, bits(theirs))


@pytest.mark.parametrize(("name", "flag"), [*FLAGS, ("SGD", "fused"), ("SGD", "foreach")])
def test_a_gradient_scaler_unscales_and_skips(name: str, flag: str) -> None:
    p, q = (nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2))
    optimizer = getattr(st.optim, name)([p], lr=0.1, **{flag: True})
    reference = getattr(torch.optim, name)([q], lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in "12"]
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
    assert_same([p], [q])
    if name != "SGD":
        assert optimizer.state[p]["step"] == 6


@every_adam
@pytest.mark.parametrize("as_tensor", (False, True))
@pytest.mark.parametrize("kind", ("step", "one_cycle", "lambda"))
def test_schedulers(name: str, kind: str, as_tensor: bool) -> None:
    ours = make_params()
    theirs = twins(ours)

    def lr() -> Any:
        return torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1

    optimizer = getattr(st.optim, name)(ours, lr=lr())
    reference = getattr(torch.optim, name)(theirs, lr=lr())

    def scheduler(opt: torch.optim.Optimizer) -> Any:
        from torch.optim import lr_scheduler as s

        if kind == "step":
            return s.StepLR(opt, step_size=3, gamma=0.5)
        if kind == "one_cycle":
            return s.OneCycleLR(opt, max_lr=0.2, total_steps=15)  # moves betas as well
        return s.LambdaLR(opt, lambda epoch: 0.9**epoch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [scheduler(optimizer), scheduler(reference)]
        for _ in range(12):
            give_gradients(ours, theirs)
            optimizer.step()
            reference.step()
            for schedule in schedules:
                schedule.step()
            assert optimizer.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
    assert_same(ours, theirs)


@every_adam
def test_hooks_and_closures(name: str) -> None:
    p = nn.Parameter(torch.ones(3).double())
    theirs, optimizer, reference = pair_of(name, [p], lr=0.5)
    q = theirs[0]
    order: list[str] = []
    for opt in (optimizer, reference):
        opt.register_step_pre_hook(lambda *_: order.append("pre"))
        opt.register_step_post_hook(lambda *_: order.append("post"))

    def closure(param: nn.Parameter, opt: torch.optim.Optimizer) -> Tensor:
        opt.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        with torch.no_grad():
            loss = optimizer.step(lambda: closure(p, optimizer))
            assert_same([loss], [reference.step(lambda: closure(q, reference))])
    assert order == ["pre", "post"] * 6
    assert_same([p], [q])


@every_adam
@pytest.mark.parametrize("how", (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))))
def test_copies_go_on_alike(name: str, how: Any) -> None:
    params = make_params()
    optimizer = getattr(st.optim, name)(params, lr=0.1)
    for _ in range(3):
        give_gradients(params, none=[1])
        optimizer.step()
    copied = how(optimizer)
    copies = copied.param_groups[0]["params"]
    for entry in copied.state.values():
        assert entry["step"].untyped_storage().nbytes() == entry["step"].nbytes
    for _ in range(3):
        give_gradients(params, copies)
        optimizer.step()
        copied.step()
    assert_bits(copies, bits(params))
    assert_same_state(states(copied, copies), states(optimizer, params))
    copied.step()
    assert_same([optimizer.state[params[0]]["step"]], [torch.tensor(6.0)])


@every_adam
def test_backward_after_an_in_between_step_raises(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = getattr(st.optim, name)(model.parameters())
    early = model(torch.randn(3, 4)).sum()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


BAD_OPTIONS: list[tuple[str, Any]] = [
    ("lr", -0.1),
    ("lr", float("nan")),
    ("lr", torch.tensor([0.1, 0.2])),
    ("betas", (1.0, 0.9)),
    ("betas", (0.9, -0.1)),
    ("betas", (0.9, float("nan"))),
    ("eps", -1e-8),
    ("eps", float("inf")),
    ("weight_decay", float("nan")),
    ("capturable", True),
    ("differentiable", True),
]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *((name, *bad) for name in ADAMS for bad in BAD_OPTIONS),
        ("Adam", "amsgrad", True),
        ("AdamW", "amsgrad", True),
        ("NAdam", "momentum_decay", float("nan")),
    ],
)
def test_bad_options(name: str, key: str, value: Any) -> None:
    params = make_params()
    with pytest.raises(ValueError):
        getattr(st.optim, name)(params, **{key: value})
    # and where it comes later
    optimizer = getattr(st.optim, name)([{"params": params[:2]}, {"params": params[2:]}])
    give_gradients(params)
    optimizer.step()
    optimizer.param_groups[1][key] = value
    kept, state = bits(params), copy.deepcopy(states(optimizer, params))
    with pytest.raises(ValueError, match="group 1"):
        optimizer.step()
    assert_bits(params, kept)
    assert_same_state(states(optimizer, params), state)


@pytest.mark.parametrize("flag", ("amsgrad", "capturable", "differentiable"))
def test_refused_flags_are_named(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag}=True is not supported"):
        st.optim.AdamW(make_params(), **{flag: True})


@every_adam
def test_sparse_gradients_are_refused_and_nothing_changes(name: str) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    other = nn.Parameter(torch.randn(4))
    groups = [{"params": [other]}, {"params": embedding.parameters()}]
    optimizer = getattr(st.optim, name)(groups)
    (embedding(torch.tensor([1, 2])).sum() + other.sum()).backward()
    kept = bits([other, embedding.weight])
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 1 is sparse"):
        optimizer.step()
    assert_bits([other, embedding.weight], kept)
    assert not optimizer.state


@every_adam
def test_dropping_the_optimizer_frees_its_memory_without_the_collector(name: str) -> None:
    params = make_params()
    optimizer = getattr(st.optim, name)(params)
    give_gradients(params)
    optimizer.step()
    with optimizer.predicted(1.0):
        pass
    moments = weakref.ref(optimizer.state[params[0]]["exp_avg_sq"])
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert moments() is None
    finally:
        gc.enable()
