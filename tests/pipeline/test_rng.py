"""Tests random numbers of stages in threads: inner, because a checkpoint's draw is watched."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spectrain_ext as st
from spectrain_ext.checkpoint.progress import Generators
from spectrain_ext.rng import RNG_LOCK, StageRandom
from studies.models.vision import resnet

CPU = torch.device("cpu")
sgd = partial(st.optim.SGD, lr=1e-3, momentum=0.9)


def pipeline(middle=nn.Dropout, **options):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), middle(0.5), nn.Dropout(0.5)) for _ in range(2)]
    return st.Pipeline(stages, sgd, nn.functional.mse_loss, **options)


def losses(pipe, minibatches=40):
    batch = torch.ones(4, 8), torch.zeros(4, 8)
    return [result.loss.item() for result in pipe.run(batch for _ in range(minibatches))]


class Checkpointed(nn.Module):
    """Its backward temporarily restores its forward's state in the default generator."""

    def __init__(self, p):
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return checkpoint(self.drop, x, use_reentrant=False)


@pytest.fixture
def busy():
    """Make threads switch continuously."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [running.result() for running in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize(
    ("middle", "options"),
    [(nn.Dropout, {}), (nn.Dropout, {"recompute": True}), (Checkpointed, {})],
    ids=["dropout", "recompute", "checkpoint"],
)
def test_pipelines_in_two_threads_draw_what_each_draws_alone(middle, options, busy):
    alone = losses(pipeline(middle, **options))
    pipes = [pipeline(middle, **options) for _ in range(2)]
    found = together(*(lambda pipe=pipe: losses(pipe) for pipe in pipes))
    assert found == [alone, alone]
    assert len(set(alone)) == len(alone)


def test_the_callers_numbers_go_on_behind_two_threads(busy):
    pipes = [pipeline(), pipeline()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    together(*(lambda pipe=pipe: losses(pipe) for pipe in pipes))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "look",
    [
        lambda: {"a new pipeline's": StageRandom(2, CPU).states()[0]},
        lambda: Generators([], 0, 1).state()["process"],
        lambda: resnet(1, width=1, seed=1)[0].state_dict(),
    ],
)
def test_others_of_this_package_meet_the_callers_numbers(look):
    before = torch.get_rng_state()
    expected, found = look(), []
    thread = threading.Thread(target=lambda: found.append(look()))
    stage = StageRandom(0, CPU)
    with RNG_LOCK, stage:
        alone = torch.rand(3)
        stage.rewind()
        thread.start()
        thread.join(0.05)
        assert torch.equal(torch.rand(3), alone)
    thread.join()
    for key, tensor in expected.items():
        assert torch.equal(found[0][key], tensor), key
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stage_may_run_another_pipeline():
    class Outer(nn.Module):
        def forward(self, x):
            inner.append(losses(pipeline(), 3))
            return x * 1.0

    inner: list[list[float]] = []
    stages = [nn.Linear(8, 8), Outer()]
    pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss, microbatches=1)
    losses(pipe, 2)
    assert inner == [losses(pipeline(), 3)] * 2


def test_the_turn_is_given_back_after_a_failure():
    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError("no")

    pipe = st.Pipeline([nn.Linear(8, 8), Fails()], sgd, nn.functional.mse_loss)
    with pytest.raises(st.StageError):
        losses(pipe, 1)
    assert together(lambda: RNG_LOCK.acquire(blocking=False) and RNG_LOCK.release() is None) == [
        True
    ]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_need_not_wait_for_a_thread_that_it_does_not_have():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with RNG_LOCK, StageRandom(0, CPU):
            inside.set()
            leave.wait(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if RNG_LOCK.acquire(timeout=5) else 1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
