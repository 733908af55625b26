"""Tests what may change between two runs: learning rates, but not what is trained."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers.pipeline_cases import (
    batches,
    close,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from torch import nn
from torch.optim.lr_scheduler import StepLR

import spectrain_ext as st


def states(pipe):
    """Return the state of every parameter by stage and name."""
    found = {}
    optimizers = {p: o for o in pipe.optimizers for g in o.param_groups for p in g["params"]}
    for name, p in pipe.named_parameters():
        if p in optimizers and p in optimizers[p].state:
            found[name] = dict(optimizers[p].state[p])
    return found


def fresh(pipe, make, method, **more):
    """Return another pipeline that continues from this one."""
    known = copy.deepcopy(states(pipe))
    made = st.Pipeline(copy.deepcopy(list(pipe.children())), make, mse, method, **more)
    made.minibatches = pipe.minibatches
    names = {p: name for name, p in made.named_parameters()}
    for optimizer in made.optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        state = {n: known[names[p]] for n, p in enumerate(params) if names[p] in known}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for ours, theirs in zip(made.schedulers, pipe.schedulers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    return made


W = "0.0.weight"


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("make", "whole", "thaws"),
    [
        (sgd(), False, True),
        (sgd(), True, False),
        (torch_sgd(), True, True),
        (torch_sgd(), False, False),
    ],
)
def test_freezing_and_unfreezing_are_refused_and_a_new_pipeline_continues(
    make, whole, thaws, tmp_path
):
    stages = tanh_stages(3)
    more = {"scheduler": lambda optimizer: StepLR(optimizer, 3, 0.5)}
    changed = stages[0] if whole else stages[0][0].weight
    changed.requires_grad_(not thaws)
    pipe = st.Pipeline(stages, make, mse, "pipedream", **more)
    losses(pipe, batches(4))
    st.checkpoint.save(tmp_path / "c", pipe)
    weights, before = copy.deepcopy(pipe.state_dict()), copy.deepcopy(states(pipe))
    changed.requires_grad_(thaws)
    name, flag = "0.bias" if whole else "0.weight", "unfrozen" if thaws else "frozen"
    match = (
        rf"stages\[0\]: parameter '{name}' was {flag} since the pipeline was made; save a "
        r"checkpoint, release\(\) this pipeline, make a new one"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=match):
            losses(pipe, batches(2))
        same((pipe.state_dict(), states(pipe), pipe.minibatches), (weights, before, 4))
    pipe.evaluate(batches(1))  # trains nothing
    pipe.release()
    with pytest.raises(RuntimeError, match=match):
        losses(pipe, batches(2))
    made = st.Pipeline(stages, make, mse, "pipedream", **more)
    if whole and thaws:
        match = "has no optimizer for stage 0; only_model=True loads without"
        with pytest.raises(st.CheckpointError, match=match):
            st.checkpoint.load(tmp_path / "c", made)
        return
    with nullcontext() if thaws else pytest.warns(UserWarning, match="parameters are frozen or"):
        st.checkpoint.load(tmp_path / "c", made)
    assert made.minibatches == 4
    assert {optimizer.param_groups[0]["lr"] for optimizer in made.optimizers} == {0.025}
    now = states(made)
    frozen = {n for n, p in made.named_parameters() if not p.requires_grad}
    assert frozen == (set() if thaws else {n for n in weights if n[0] == "0" and (whole or n == W)})
    same(now, {name: entry for name, entry in before.items() if name not in frozen})
    losses(made, batches(4))
    assert frozen == {n for n, p in made.named_parameters() if torch.equal(p, weights[n])}


def test_new_parameters_are_refused_and_frozen_ones_are_not():
    pipe = st.Pipeline(stages := tanh_stages(2), sgd(), mse)
    stages[1].append(nn.Linear(5, 5))
    with pytest.raises(RuntimeError, match=r"stages\[1\]: parameter '4.bias' was unfrozen"):
        losses(pipe, batches(1))
    stages[1][4].requires_grad_(False)
    losses(pipe, batches(1))


def test_a_tied_weight_is_refused_where_it_is_trained():
    stages = tanh_stages(3)
    stages[2][0].weight = stages[0][0].weight
    pipe = st.Pipeline(stages, sgd(), mse)
    for stage, k in ((stages[2], 2), (stages[0], 0)):
        stage[0].weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match=rf"stages\[{k}\]: parameter '0.weight' was frozen"):
            losses(pipe, batches(1))
        stage[0].weight.requires_grad_(True)
    losses(pipe, batches(2))


# Rates, and other numbers of parameter groups


def adam(**changed):
    return lambda params: st.optim.AdamW(params, **{"lr": 0.05, **changed})


def by_steps(optimizer):
    return StepLR(optimizer, 4, 0.5)


@pytest.mark.parametrize("scheduler", [None, by_steps])
@pytest.mark.parametrize(
    ("method", "make", "changed"),
    [
        *((method, sgd, {"lr": 0.01}) for method in ("1f1b", "auto", "spectrain")),
        *((method, adam, {"lr": 0.2}) for method in ("auto", "xpipe", "pipedream")),
        ("spectrain", sgd, {"momentum": 0.5, "weight_decay": 0.1}),
        (st.spectrain(law="difference"), torch_sgd, {"lr": 0.01}),
    ],
)
def test_numbers_of_groups_hold_from_the_next_run_on(method, make, changed, scheduler):
    more = {"scheduler": scheduler, "microbatches": 1}
    pipe = st.Pipeline(tanh_stages(3), make(), mse, method, **more)
    losses(pipe, batches(6))
    scale = 1.0 if scheduler is None else 0.5  # the scheduler's present factor
    for optimizer in pipe.optimizers:
        for group in optimizer.param_groups:
            group.update(changed)
    rate = changed.get("lr", 0.05 * scale)
    other = fresh(pipe, make(**{**changed, "lr": rate}), method, **more)
    for optimizer in other.optimizers:
        for group in optimizer.param_groups:  # as a new scheduler leaves it
            group["lr"] = rate
    data = batches(6)
    for found, expected in zip(losses(pipe, data), losses(other, data), strict=True):
        close(found, expected)
    for p, q in zip(pipe.parameters(), other.parameters(), strict=True):
        close(p, q)
    found = {group["lr"] for o in pipe.optimizers for group in o.param_groups}
    assert found == {rate * scale * scale}  # after 12 updates
