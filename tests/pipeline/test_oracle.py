"""Tests every method's losses and final weights against the oracle."""

from __future__ import annotations

import hypothesis.strategies as hypothesis
import pytest
import torch
from helpers.pipeline_cases import (
    Compared,
    batches,
    every_method,
    examples,
    float64,  # noqa: F401  # a fixture
    sgd,
    tanh_stages,
    torch_sgd,
)
from hypothesis import given
from oracle.methods import METHODS as DEFINITIONS
from oracle.sgd import AveragingSGD
from torch import nn

import spectrain_ext as st

AVERAGING = (st.optim.SGD, AveragingSGD)


@every_method
def test_a_long_run(method):
    compared = Compared(tanh_stages(4), method)
    compared.run(batches(64))
    compared.run(batches(9))  # a second run starts from the present versions and momentum


@every_method
@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_few_minibatches(method, count):
    compared = Compared(tanh_stages(5), method)
    compared.run(batches(count))
    compared.run(batches(3))


@every_method
def test_uneven_stages_and_an_uneven_last_minibatch(method):
    stages = [
        nn.Sequential(nn.Linear(5, 17), nn.ReLU(), nn.Linear(17, 3)),
        nn.Linear(3, 8),
        nn.Sequential(nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(4)), nn.GELU()),
        nn.Sequential(nn.Linear(8, 5, bias=False)),
    ]
    compared = Compared(stages, method)
    compared.run(batches(11, size=6, last=2))
    compared.run(batches(11, size=6, last=5))


@every_method
def test_classification(method):
    data = [(torch.randn(4, 5), torch.randint(0, 5, (4,))) for _ in range(12)]
    Compared(tanh_stages(3), method, loss_fn=nn.functional.cross_entropy).run(data)


@every_method
def test_microbatches(method):
    """Also minibatches with fewer samples than parts; the settings have other numbers."""
    compared = Compared(tanh_stages(4), method, microbatches=3)
    compared.run(batches(9, size=8, last=5))
    compared.run([*batches(3, size=8), *batches(2, size=2), *batches(3, size=1)])


@every_method
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda opt: torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.5),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, 40, cycle_momentum=False),
    ],
    ids=["now and then", "there and back"],
)
def test_schedulers(method, scheduler):
    compared = Compared(tanh_stages(4), method, scheduler=scheduler)
    compared.run(batches(14))
    compared.run(batches(9))
    for mine, theirs in zip(compared.pipe.optimizers, compared.oracle.optimizers, strict=True):
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


@every_method
def test_parameter_groups(method):
    def groups(params):
        return [{"params": params[:1], "lr": 0.01}, {"params": params[1:], "weight_decay": 0.1}]

    mine, theirs = sgd(), torch_sgd()
    optimizer = (lambda params: mine(groups(params)), lambda params: theirs(groups(params)))
    compared = Compared(tanh_stages(4), method, optimizer=optimizer)
    compared.run(batches(14))
    compared.run(batches(5))


@every_method
@pytest.mark.parametrize(
    "changed",
    [{"dampening": 0.5}, {"maximize": True}],
    ids=str,
)
def test_optimizer_options(method, changed):
    optimizer = (sgd(lr=0.01, **changed), torch_sgd(lr=0.01, **changed))
    Compared(tanh_stages(3), method, optimizer=optimizer).run(batches(12))


@every_method
def test_gradient_clipping_by_a_step_hook(method):
    clipped = []

    def clip(opt, *_):
        params = [p for group in opt.param_groups for p in group["params"]]
        clipped.append(float(nn.utils.clip_grad_norm_(params, 0.05)))

    def with_hook(make):
        def made(params):
            opt = make(params)
            opt.register_step_pre_hook(clip)
            return opt

        return made

    compared = Compared(
        tanh_stages(3), method, optimizer=(with_hook(sgd()), with_hook(torch_sgd()))
    )
    compared.run(batches(10))
    assert len(clipped) == 2 * 3 * 10
    assert max(clipped) > 0.05


@pytest.mark.parametrize("method", ["sync", "vanilla", "pipedream"])
def test_without_momentum(method):
    optimizer = (sgd(momentum=0.0), torch_sgd(momentum=0.0))
    Compared(tanh_stages(3), method, optimizer=optimizer).run(batches(10))


@examples(20)
@given(
    method=hypothesis.sampled_from(sorted(DEFINITIONS)),
    n=hypothesis.integers(1, 5),
    runs=hypothesis.lists(hypothesis.integers(0, 9), min_size=1, max_size=3),
    sizes=hypothesis.tuples(hypothesis.integers(1, 6), hypothesis.integers(1, 6)),
    parts=hypothesis.integers(1, 4),
    decay=hypothesis.booleans(),
    leave=hypothesis.none() | hypothesis.integers(0, 6),
)
def test_any_combination(method, n, runs, sizes, parts, decay, leave):
    def scheduler(opt):
        return torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.8 if decay else 1.0)

    definition = DEFINITIONS[method]
    n = min(n, definition.stages)
    if definition.reads == "previous":
        parts = max(parts, n)
    optimizer = (sgd(), torch_sgd())
    if definition.averaged:
        optimizer = tuple(
            lambda p, k=k: k(p, lr=0.5, momentum=0.9, smoothed=True) for k in AVERAGING
        )
    compared = Compared(
        tanh_stages(n), method, optimizer=optimizer, scheduler=scheduler, microbatches=parts
    )
    for count in runs:
        data = batches(count, size=sizes[0], last=sizes[1] if count else None)
        compared.run(data)
    data, taken = batches(7), []
    for result in compared.pipe.run(batch for batch in data if taken.append(batch) is None):
        if result.index == leave:
            break
    compared.oracle.run(taken)
    compared.check_weights()


@every_method
def test_a_learning_rate_changed_by_hand(method):
    """The caller sets lr between results; every stage uses it at its next update or prediction."""
    compared = Compared(tanh_stages(1), method)

    def halve(optimizers):
        for opt in optimizers:
            opt.param_groups[0]["lr"] /= 2

    for _ in range(3):
        compared.run(batches(4))
        halve(compared.oracle.optimizers)
        halve(compared.pipe.optimizers)
