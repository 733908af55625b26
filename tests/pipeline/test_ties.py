"""Tied weights: a parameter of several stages is trained as one."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.foreign_optimizers import FOREIGN
from helpers.pipeline_cases import (
    Compared,
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

import spectrain_ext as st

METHODS = [name for name in st.methods() if name not in ("xgrad", "spectrain-ema")]


def tied(n, places=(0, -1)):
    """Stages of two layers each, the first one's weight the same in several of them."""
    stages = tanh_stages(n)
    for k in places[1:]:
        stages[k][0].weight = stages[places[0]][0].weight
    return stages


def names(n, places=(0, -1)):
    return [f"{k % n}.0.weight" for k in places]


def alike(state, n, places=(0, -1)):
    first, *others = (state[name] for name in names(n, places))
    return all(torch.equal(first, other) for other in others)


# What is computed.


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_does_what_its_definition_says(method, n, parts):
    parts = n if method == "pipedream-2bw" else parts
    compared = Compared(tied(n), method, microbatches=parts)
    compared.run(batches(9, size=5, last=2))
    compared.run(batches(3, size=5))
    assert alike(compared.pipe.state_dict(), n)


@pytest.mark.parametrize("places", [(0, 1), (0, 1, 2, 3), (1, 3), (0, 2, 3)])
@pytest.mark.parametrize("method", ["gpipe", "vanilla", "spectrain", "auto"])
def test_copies_on_any_stages(method, places):
    """Those before the last have several microbatches in flight, each with a version of its own."""
    parts = 2 if method == "gpipe" else 1
    compared = Compared(tied(4, places), method, microbatches=parts)
    compared.run(batches(10, size=4))
    assert alike(compared.pipe.state_dict(), 4, places)


@pytest.mark.parametrize("window", ["wide", 3])
@pytest.mark.parametrize("method", ["vanilla", "spectrain", "spectrain-local", "pipedream"])
def test_other_windows(method, window):
    compared = Compared(tied(3), method, window=window, microbatches=2)
    compared.run(batches(10, size=4))


@pytest.mark.parametrize("parts", [1, 3])
def test_synchronous_training_is_that_of_the_uncut_model(parts):
    stages = tied(3, (0, 1, 2))
    whole = copy.deepcopy(nn.Sequential(*stages))
    data = batches(8, size=6)
    pipe = st.Pipeline(stages, sgd(), mse, "sync", microbatches=parts)
    found = losses(pipe, data)
    optimizer, expected = torch_sgd()(whole.parameters()), []
    for x, y in data:
        optimizer.zero_grad()
        expected.append(mse(whole(x), y))
        expected[-1].backward()
        optimizer.step()
    close(torch.stack(found), torch.stack(expected).detach())
    close(dict(pipe.state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("spectrain", {"recompute": True}),
        ("gpipe", {"recompute": True, "microbatches": 3}),
        ("vanilla", {"clip_norm": 0.05}),
        ("gpipe", {"clip_norm": 0.05, "clip_scope": "global", "microbatches": 2}),
        ("1f1b", {"clip_norm": 0.05, "clip_scope": "global", "microbatches": 2}),
        ("auto", {"clip_norm": 0.05, "microbatches": 3}),
        ("spectrain", {"scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)}),
    ],
)
def test_settings(method, more):
    Compared(tied(3), method, **more).run(batches(9, size=4))


@pytest.mark.parametrize("method", ["vanilla", "lwp-w", "auto"])
def test_optimizers_that_are_not_the_packages(method):
    compared = Compared(
        tied(3), method, optimizer=(FOREIGN["Lion"], FOREIGN["Lion"]), microbatches=1
    ) if method != "auto" else None
    if compared is not None:
        compared.run(batches(8, size=4))
        return
    pipe = st.Pipeline(tied(3), torch_sgd(), mse)
    losses(pipe, batches(8, size=4))
    assert alike(pipe.state_dict(), 3)
