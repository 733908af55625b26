"""Tests random numbers of stages, in threads too: inner, as a checkpoint's draw is watched."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers.random_modules import Function
from torch import nn
from torch.utils.checkpoint import checkpoint

import spectrain_ext as st
from spectrain_ext.checkpoint.progress import Generators
from spectrain_ext.rng import RNG_LOCK, StageRandom
from studies.models.vision import resnet

CPU = torch.device("cpu")
sgd = partial(st.optim.SGD, lr=1e-3, momentum=0.9)
BATCH = torch.ones(4, 8), torch.zeros(4, 8)


def pipeline(middle=nn.Dropout, seed=0, **options):
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(8, 8), middle(0.5), nn.Dropout(0.5)) for _ in range(2)]
    return st.Pipeline(stages, sgd, nn.functional.mse_loss, **options)


def losses(pipe, minibatches=40):
    return [result.loss.item() for result in pipe.run(BATCH for _ in range(minibatches))]


def checkpointed(p):
    """Its backward temporarily restores its forward's state in the default generator."""
    return Function(lambda x, drop: checkpoint(drop, x, use_reentrant=False), nn.Dropout(p))


class Noting(nn.Dropout):
    """Keeps random numbers that it draws in its forward."""

    def __init__(self, p):
        super().__init__(p)
        self.seen = []

    def forward(self, x):
        self.seen.append(tuple(torch.rand(3).tolist()))
        return super().forward(x)


def seen(pipe):
    return [numbers for stage in pipe.children() for numbers in stage[1].seen]


@pytest.mark.parametrize("method", ["gpipe", "zb-h1", "vanilla", "auto"])
def test_random_numbers_do_not_depend_on_the_schedule_or_the_caller(method):
    expected = pipeline(Noting, microbatches=1, method="sync")
    losses(expected, 7)
    for draws in (0, 1):
        pipe, given = pipeline(Noting, microbatches=1, method=method), []
        before = torch.get_rng_state()
        for _ in pipe.run((given.append(torch.rand(draws)) or BATCH) for _ in range(7)):
            torch.rand(7 * draws)
        assert draws or torch.equal(torch.get_rng_state(), before)
        assert not draws or torch.cat(given).unique().numel() == 7
        assert seen(pipe) == seen(expected)


def test_no_two_draws_of_stages_minibatches_and_seeds_are_the_same():
    pipes = [pipeline(Noting, seed, microbatches=1) for seed in range(4)]
    assert all(losses(pipe, 3) for pipe in pipes)
    assert len({numbers for pipe in pipes for numbers in seen(pipe)}) == 4 * 2 * 3


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
    [(nn.Dropout, {}), (nn.Dropout, {"recompute": True}), (checkpointed, {})],
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
    inner = []
    pipe = pipeline(microbatches=1)
    pipe.get_submodule("1").register_forward_hook(lambda *_: inner.append(losses(pipeline(), 3)))
    losses(pipe, 2)
    assert inner == [losses(pipeline(), 3)] * 2


def test_the_turn_is_given_back_after_a_failure():
    pipe = st.Pipeline([nn.Linear(9, 8)], sgd, nn.functional.mse_loss)
    with pytest.raises(st.StageError):
        losses(pipe, 1)
    assert together(lambda: RNG_LOCK.acquire(blocking=False) and not RNG_LOCK.release()) == [True]


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
        os._exit(0 if RNG_LOCK.acquire(timeout=60) else 1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
