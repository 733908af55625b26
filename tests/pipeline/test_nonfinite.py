"""Tests losses and gradients that are not finite: skipped updates and errors."""

from __future__ import annotations

import copy
import gc
import itertools
from dataclasses import replace
from functools import partial
from math import inf, nan

import pytest
import torch
from helpers.nonfinite_programs import Overflows, Passes, everything, infinite, poisoned
from helpers.passes import with_passes
from helpers.pipeline_cases import Compared, batches, losses, mse, sgd, tanh_stages, torch_sgd
from helpers.random_modules import Function
from oracle.methods import SECOND_ORDER, Definition, nearest
from oracle.schedules import FLUSHING
from torch import nn
from torch.optim.lr_scheduler import StepLR

import spectrain_ext as st
from spectrain_ext.passes import CheckFinite

pytestmark = pytest.mark.usefixtures("float64")


def steps(optimizer):
    return StepLR(optimizer, 2, 0.5)


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
        ("1f1b", {"microbatches": 2, "codec": st.codecs.Int8()}),
    ],
)
def test_with_a_flush_it_is_as_if_the_batch_had_never_come(method, more, what, caplog):
    data, stages, runs = batches(5, size=6), everything(), []
    bad = [poisoned(data[0], what)] * 2
    for given, on_nonfinite in (([*data[:2], *bad, *data[2:]], "skip"), (data, None)):
        torch.manual_seed(1)
        own, more = copy.deepcopy(stages), {**more, "on_nonfinite": on_nonfinite}
        pipe = st.Pipeline(own, sgd(), mse, method, scheduler=steps, **with_passes(more))
        found = losses(pipe, given)
        if on_nonfinite:
            assert all(loss.isnan() for loss in found[2:4])
            del found[2:4]
            assert pipe.skipped == (2, 2, 2)
            said = "minibatch {}, stage 2: the loss is not finite; all stages skip the update"
            assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
                said.format(i) for i in (2, 3)
            ]
        optimizers = [o.state_dict()["state"] for o in pipe.optimizers]
        schedulers = [s.state_dict() for s in pipe.schedulers]
        numbers = [r.states() for r in pipe.random]
        runs.append((found, pipe.state_dict(), optimizers, schedulers, numbers))
    same(*runs)


# Like auto's predictions with any optimizer: as far ahead as stage 0 needs.
BY_DIFFERENCE = Definition(
    law="difference",
    forward=lambda k, n, w, m: nearest((w + k - 1) / m),
    backward="stash",
    roomy=True,
)
PREDICTING = replace(
    SECOND_ORDER,
    backward="predict",
    backward_horizon=lambda k, n, w, m: SECOND_ORDER.lead(k, n, w, m, n - 1),  # without windows
)


@pytest.mark.parametrize(
    ("method", "parts", "more"),
    [
        *((name, 4, {}) for name in ("1f1b", "zb-h1", "error-feedback", "zb-h1-async")),
        *((name, 1, {}) for name in ("pipedream", "spectrain", "dc-asgd", "gap-aware", "lwp-w")),
        # Methods whose drain overwrites a step's prediction.
        (st.second_order(backward="predict"), 1, {"definition": PREDICTING}),
        ("pipemare", 1, {}),  # its rates count minibatches
        ("auto", 1, {"clip_norm": 0.02}),
        ("auto", 3, {"recompute": True}),
        ("auto", 3, {"optimizer": (torch_sgd(), torch_sgd()), "definition": BY_DIFFERENCE}),
    ],
)
def test_what_is_left_out_is_what_the_definition_says(method, parts, more):
    data = batches(12, size=6)
    data[0] = poisoned(data[0], "target", 1000.0)
    data[3] = poisoned(data[3], "input", 100.0)
    data[4] = poisoned(data[4], "target", nan)
    data[7] = poisoned(data[7], "input")
    data[8] = poisoned(data[8], "target", 1000.0)
    data[11] = poisoned(data[11], "input")
    for where in ("weight", "output"):
        stages = [Passes(), Passes(where), Passes(), Passes()]
        settings = {"microbatches": parts, "scheduler": steps, "on_nonfinite": "skip"}
        compared = Compared(stages, method, loss_fn=infinite, **settings, **more)
        compared.run(data)
        flushes = compared.oracle.method.schedule in FLUSHING
        assert compared.pipe.skipped == ((6, 6, 6, 6) if flushes else (6, 6, 5, 5))
        compared.run(data[9:])


class Again(nn.Module):
    """A loss that contains a part of the last stage."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, output, target):
        return mse(self.norm(output), target)


@pytest.mark.parametrize("recompute", [False, True])
def test_buffers_that_stage_and_loss_share_are_as_before_the_minibatch(recompute):
    norm = nn.BatchNorm1d(5, affine=False)
    stages, data = [nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), norm)], batches(3, size=6)
    more = {"passes": [CheckFinite("skip")], "recompute": recompute}
    pipe = st.Pipeline(stages, sgd(), Again(norm), "gpipe", **more)
    losses(pipe, data[:2])
    before = copy.deepcopy(pipe.state_dict())
    losses(pipe, [poisoned(data[2], "target")])
    assert pipe.skipped == (1, 1)
    same(dict(pipe.state_dict()), dict(before))


@pytest.mark.parametrize("method", ["gpipe", "pipedream"])
def test_nothing_is_kept_of_minibatches_that_were_finite(method):
    found, more = {}, {"passes": [CheckFinite("skip")], "microbatches": 2}
    pipe = st.Pipeline(everything(2), sgd(), mse, method, **more)
    for result in pipe.run(batches(30, size=6)):
        if result.index in (9, 24):
            gc.collect()
            found[result.index] = sum(type(o) is torch.Tensor for o in gc.get_objects())
    assert found[9] == found[24]


def test_draws_of_a_codec_after_a_minibatch_that_was_left_out(tmp_path):
    """In a second run and from a checkpoint: they are those of the run without it."""
    data, stages = batches(6, size=6), tanh_stages(3)
    bad = poisoned(data[1], "input", nan)

    def made(on_nonfinite="skip"):
        more = {"microbatches": 2, "codec": st.codecs.Int8(), "on_nonfinite": on_nonfinite}
        return st.Pipeline(copy.deepcopy(stages), sgd(), mse, "1f1b", **with_passes(more))

    clean, kept, resumed = made(None), made(), made()
    expected = losses(clean, data)
    for pipe, given in ((kept, [data[0], bad, bad, *data[1:3]]), (resumed, [bad])):
        pipe.fit(given)
    st.checkpoint.save(tmp_path / "c", kept)
    st.checkpoint.load(tmp_path / "c", resumed)
    assert losses(kept, data[3:]) == losses(resumed, data[3:]) == expected[3:]


@pytest.mark.parametrize("phases", [["pipedream"], ["gpipe"], ["gpipe", "pipedream"]])
def test_ties_masters_and_phases(phases, caplog):
    """A copy's gradient affects the first stage with the weights, and all stages between."""
    caplog.set_level("WARNING")
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(9, size=6)]
    bad, runs = poisoned(data[2], "input", 100.0), []
    for skips in (True, False):
        torch.manual_seed(4)
        method = phases[0]
        if len(phases) > 1:  # between the first two runs: skipped updates are counted
            method = st.hybrid(*phases, after=4 if skips else 3)
        stages = [Passes().bfloat16(), Passes().bfloat16(), Passes("weight").bfloat16()]
        stages[2].linear.weight = stages[0].linear.weight
        more = {"master_dtype": torch.float32, "on_nonfinite": "skip" if skips else None}
        adamw = partial(st.optim.AdamW, lr=0.01)
        pipe = st.Pipeline(stages, adamw, mse, method, microbatches=2, **with_passes(more))
        for number in range(3):  # drained in between: exact without a flush as well
            given = data[3 * number : 3 * number + 3]
            pipe.fit([*given, bad] if skips and number < 2 else given)
        assert pipe.skipped == ((2, 2, 2) if skips else (0, 0, 0))
        masters = list(pipe.masters().values())
        runs.append((pipe.state_dict(), [o.state_dict() for o in pipe.optimizers], masters))
    same(*runs)
    said = "minibatch 3, stage 2: a gradient is not finite; all stages skip"
    assert phases == ["gpipe"] or said in caplog.text


def test_without_a_flush_running_statistics_stay_as_they_were():
    stages, data = [*everything(2), nn.Linear(5, 5)], batches(8, size=6)
    pipe = st.Pipeline(
        stages, sgd(), mse, "pipedream", passes=[CheckFinite("skip")], microbatches=2
    )
    pipe.fit(data)
    before = copy.deepcopy(pipe.state_dict())
    losses(pipe, [poisoned(data[0], "input")])
    for name, value in pipe.state_dict().items():
        assert "num_batches" in name or torch.equal(value, before[name])


@pytest.mark.parametrize("method", ["gpipe", "auto"])
@pytest.mark.parametrize(
    ("what", "number", "stage", "reason"),
    [
        ("target", nan, 2, "the loss is not finite"),
        ("input", 100.0, 1, "the gradient of 'linear.weight' is not finite"),
    ],
)
def test_what_is_raised(method, what, number, stage, reason):
    stages = [Passes(), Passes("weight"), Passes()]
    other = st.Pipeline(copy.deepcopy(stages), sgd(), mse, method)
    pipe, data = st.Pipeline(stages, sgd(), mse, method, passes=[CheckFinite("raise")]), batches(6)
    data[3] = poisoned(data[3], what, number)
    with pytest.raises(st.StageError) as caught:
        losses(pipe, data)
    error = caught.value
    assert (error.stage, error.minibatch) == (stage, 3)
    assert (type(error.__cause__), str(error.__cause__)) == (FloatingPointError, reason)
    assert all(value.isfinite().all() for value in pipe.state_dict().values())
    losses(other, data[:3])
    if method == "gpipe":  # no stage has updated by this minibatch
        same(pipe.state_dict(), other.state_dict())
    assert all(loss.isfinite() for loss in losses(pipe, data[:3]))


@pytest.mark.parametrize("between", [nn.Identity(), Function(torch.fft.fft)])
def test_an_input_gradient_that_is_not_finite_is_found_where_it_comes_from(between, caplog):
    """There is no stage with weights before it, so it reports its input."""
    middle = nn.Sequential(Overflows(), Function(torch.abs), nn.Linear(5, 5))
    stages = [nn.Sequential(nn.Linear(5, 5), between), middle, nn.Linear(5, 5)]
    pipe = st.Pipeline(stages, sgd(), mse, "pipedream", passes=[CheckFinite("skip")])
    losses(pipe, [poisoned(batch, "input", 1e6) for batch in batches(1)])
    assert pipe.skipped == (1, 1, 0)
    assert "minibatch 0, stage 1: a gradient is not finite; stages 0 to 1 skip" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_number_of_a_gradient_counts(dtype):
    """The largest numbers are finite, although their sum is not."""
    gradient = torch.full((3, 67), torch.finfo(dtype).max, dtype=dtype).T
    stage = nn.Linear(3, 67, bias=False, dtype=dtype)
    stage.weight.register_hook(lambda _: gradient.clone())
    more = {"microbatches": 1, "on_nonfinite": "skip"}
    pipe = st.Pipeline([stage], torch_sgd(lr=0.0, momentum=0.0), mse, "sync", **with_passes(more))
    data = [(torch.ones(2, 3, dtype=dtype), torch.ones(2, 67, dtype=dtype))]
    losses(pipe, data)
    assert pipe.skipped == (0,)
    for count, (number, place) in enumerate(itertools.product((nan, inf, -inf), (0, 31, 66)), 1):
        gradient[place, 1] = number
        losses(pipe, data)
        assert pipe.skipped == (count,)
        gradient[place, 1] = 1.0


def test_a_sparse_gradient():
    stage = nn.Sequential(nn.Embedding(4, 5, sparse=True), Overflows(), nn.Linear(5, 5))
    with torch.no_grad():
        stage[0].weight[3] = 1000.0
    pipe = st.Pipeline([stage], torch_sgd(momentum=0.0), mse, passes=[CheckFinite("skip")])
    for token, skipped in ((2, 0), (3, 1)):
        losses(pipe, [(torch.full((4,), token), torch.zeros(4, 5))])
        assert pipe.skipped == (skipped,)


class Scaled(nn.Linear):
    """Divides by a running mean of its inputs' sizes."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_buffer("size", torch.ones(5))

    def forward(self, x):
        self.size.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        return super().forward(x / self.size.clone()).tanh()


@pytest.mark.parametrize("method", ["spectrain", "pipedream-2bw"])
def test_without_a_flush_a_run_recovers_from_a_buffer_that_outputs_depend_on(method):
    """Later minibatches in flight had kept the nan, so that every later update was skipped."""
    stages, data = [Scaled() for _ in range(4)], batches(18, size=12)
    pipe = st.Pipeline(stages, sgd(), mse, method, microbatches=4, passes=[CheckFinite("skip")])
    found = losses(pipe, [poisoned(data[0], "input"), *data[1:]])
    assert max(pipe.skipped) < 9
    assert all(stage.size.isfinite().all() for stage in stages)
    assert torch.tensor(found[9:]).isfinite().all()
