"""Tests what may change between two runs: learning rates, but not what is trained."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
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
    names = {p: name for name, p in pipe.named_parameters()}
    return {
        names[p]: dict(entry)
        for optimizer in pipe.optimizers
        for p, entry in optimizer.state.items()
    }


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


# Numbers of parameter groups. oracle/cases.py changes rates by hand, with every family of methods.

ADAMW = partial(st.optim.AdamW, lr=0.05), partial(torch.optim.AdamW, lr=0.05)


@pytest.mark.parametrize(
    ("method", "makes", "changed"),
    [
        ("xpipe", ADAMW, {"lr": 0.2}),
        ("pipedream", ADAMW, {"weight_decay": 0.1}),
        ("spectrain", (sgd(), torch_sgd()), {"momentum": 0.5, "weight_decay": 0.1}),
        ("lwp-w", (torch_sgd(), torch_sgd()), {"lr": 0.01}),
    ],
)
def test_numbers_of_groups_hold_from_the_next_run_on(method, makes, changed):
    """A scheduler goes on from them."""
    more = {"optimizer": makes, "scheduler": partial(StepLR, step_size=4, gamma=0.5)}
    compared = Compared(tanh_stages(3), method, **more)
    compared.run(batches(6))
    for optimizer in (*compared.pipe.optimizers, *compared.oracle.optimizers):
        optimizer.param_groups[0].update(changed)
    compared.run(batches(6))
    found = {optimizer.param_groups[0]["lr"] for optimizer in compared.pipe.optimizers}
    assert found == {changed.get("lr", 0.025) * 0.25}  # after 12 updates
