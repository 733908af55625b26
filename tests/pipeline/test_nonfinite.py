"""Losses and gradients that are not finite: what is left out, and what is raised."""

from __future__ import annotations

import copy
from math import nan

import pytest
import torch
from helpers.nonfinite_programs import Passes, everything, infinite, poisoned
from helpers.pipeline_cases import (
    Compared,
    batches,
    float64,  # noqa: F401  # a fixture
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from oracle.methods import Definition, nearest
from oracle.schedules import FLUSHING

import spectrain_ext as st
from spectrain_ext.pipeline.checks import all_finite


def steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["input", "target"])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sync", {}),
        ("gpipe", {"microbatches": 3, "clip_norm": 0.1, "recompute": True}),
        ("1f1b", {"microbatches": 2, "clip_norm": 0.1, "clip_scope": "stage"}),
        ("zb-h1", {"microbatches": 3}),
    ],
)
def test_with_a_flush_it_is_as_if_the_batch_had_never_come(method, more, what, caplog):
    data, stages, runs = batches(7, size=6), everything(), []
    for skips in (True, False):
        torch.manual_seed(1)
        given, on_nonfinite = list(data), None
        if skips:
            given[2:2], on_nonfinite = [poisoned(data[0], what)] * 2, "skip"
        own = copy.deepcopy(stages)
        more = {**more, "on_nonfinite": on_nonfinite}
        pipe = st.Pipeline(own, sgd(), mse, method, scheduler=steps, **more)
        losses = [result.loss for result in pipe.run(given)]
        if skips:
            assert all(loss.isnan() for loss in losses[2:4])
            del losses[2:4]
            assert pipe.skipped == (2, 2, 2)
            said = "minibatch {}, stage 2: the loss is not finite; all stages leave the update out"
            assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
                said.format(i) for i in (2, 3)
            ]
        optimizers = [o.state_dict()["state"] for o in pipe.optimizers]
        schedulers = [s.state_dict() for s in pipe.schedulers]
        numbers = [r.states() for r in pipe.random]
        runs.append((losses, pipe.state_dict(), optimizers, schedulers, numbers))
    same(*runs)


# As the predictions of auto with any optimizer; as far ahead as stage 0 has to.
BY_DIFFERENCE = Definition(
    law="difference",
    forward=lambda k, n, w, m: nearest((w + k - 1) / m),
    backward="stash",
    roomy=True,
)


@pytest.mark.parametrize(
    ("method", "parts", "more"),
    [
        *((name, 4, {}) for name in ("1f1b", "gpipe", "zb-h1", "pipedream-2bw", "zb-h1-async")),
        *((name, 1, {}) for name in ("pipedream", "spectrain", "dc-asgd", "lwp-w")),
        ("auto", 1, {"clip_norm": 0.02}),
        ("auto", 4, {"recompute": True}),
        ("auto", 4, {"optimizer": (torch_sgd(), torch_sgd()), "definition": BY_DIFFERENCE}),
    ],
)
def test_what_is_left_out_is_what_the_definition_says(method, parts, more):
    data = batches(12, size=6)
    data[0] = poisoned(data[0], "target", 1000.0)
    data[3] = poisoned(data[3], "input", 100.0)
    data[4] = poisoned(data[4], "target", nan)
    data[7] = poisoned(data[7], "input")
    data[8] = poisoned(data[8], "target", 1000.0)
    for where in ("weight", "output"):
        stages = [Passes(), Passes(where), Passes(), Passes()]
        settings = {"microbatches": parts, "scheduler": steps, "on_nonfinite": "skip"}
        compared = Compared(stages, method, loss_fn=infinite, **settings, **more)
        compared.run(data)
        flushes = compared.oracle.method.schedule in FLUSHING
        assert compared.pipe.skipped == ((5, 5, 5, 5) if flushes else (5, 5, 4, 4))
        compared.run(data[9:])
