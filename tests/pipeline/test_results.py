"""Tests what a run hands out: losses, also with counts, kept outputs, and several observers."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from helpers.passes import with_passes
from helpers.pipeline_cases import batches, close, every_method, losses, mse, sgd, tanh_stages
from helpers.random_settings import PREVIOUS
from helpers.replica_programs import IGNORED, sentences, total_and_count, words
from torch import nn

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")


class Seen(st.Observer):
    def __init__(self, log, name, fails=None):
        self.log, self.name, self.fails = log, name, fails

    def note(self, what):
        self.log.append((self.name, what))
        if self.fails == what:
            raise ValueError(f"{self.name} fails in {what}")

    def begin(self, rules, devices):
        self.note("begin")

    def watch(self, run, handlers):
        def noted(kind, handler, i, j):
            self.note(kind)
            handler(i, j)

        self.note(run.stage.index)
        return {kind: partial(noted, kind, handler) for kind, handler in handlers.items()}

    def result(self, result):
        self.note("result")

    def end(self):
        self.note("end")


def check_updates_at_results(method, n, m, **more):
    stages = [nn.Linear(2, 2) for _ in range(n)]
    stages[n // 2].requires_grad_(n == 1)
    make = sgd(lr=0.01, smoothed=method == "spectrain-smoothed")
    pipe = st.Pipeline(stages, make, mse, method, microbatches=m, **more)
    updates = [0] * len(pipe.optimizers)
    for k, optimizer in enumerate(pipe.optimizers):
        optimizer.register_step_post_hook(lambda *_, k=k: updates.__setitem__(k, updates[k] + 1))
    data = [batches(1, size, width=2)[0] for size in (m, 1, 1, 1, max(1, m - 1), m)]
    for result in pipe.run(data):
        assert updates == [result.index + 1] * len(updates)
    assert result.index == 5


SHAPES = [(n, m) for n in range(1, 5) for m in range(1, 7)]  # stages, microbatches


@pytest.mark.parametrize("method", st.methods())
@pytest.mark.parametrize(
    "shapes",
    [[(3, 2), (4, 4)], pytest.param(SHAPES, marks=pytest.mark.nightly)],
    ids=["few", "all"],
)
def test_at_a_result_each_stage_has_made_the_updates_up_to_its_minibatch(method, shapes):
    for n, m in shapes if method != "xgrad" else [(1, 2)]:
        if method not in PREVIOUS or m >= n:
            for clips in {}, {"clip_norm": 1.0}:
                check_updates_at_results(method, n, m, **clips)


@pytest.mark.parametrize("method", ["auto", "1f1b", "zb-h1"])
def test_updates_at_results_with_a_pass_that_may_skip_them(method):
    check_updates_at_results(method, 4, 3, passes=[st.passes.CheckFinite("skip")])


def test_several_observers_look_on(tmp_path):
    pipe, data, log = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3), []
    trace = st.Trace()
    list(pipe.run(data, trace=(Seen(log, "a"), trace, Seen(log, "b"))))
    of = {name: [what for who, what in log if who == name] for name in "ab"}
    assert of["a"] == of["b"]
    assert of["a"].count("result") == 3
    assert (log[0], log[-1]) == (("a", "begin"), ("b", "end"))
    assert len(trace.spans()) > 3
    assert len(list(pipe.run(data, trace=[]))) == 3
    for wrong, where in (([trace, 3], r"trace\[1\]: .*int"), (True, "trace: .*bool")):
        with pytest.raises(TypeError, match=where):
            pipe.run(data, trace=wrong)
    manager = st.checkpoint.CheckpointManager(tmp_path, pipe)
    kept = [r.kept for r in manager.run(data, trace=[trace, st.Trace()], keep=right)]
    assert len(kept) == 3 and kept[0].dim() == 0


@pytest.mark.parametrize("what", ["begin", "result", "end"])
def test_one_observer_fails_and_all_end(what):
    pipe, data, log = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3), []
    observers = [Seen(log, "a"), Seen(log, "b", fails=what), Seen(log, "c")]
    with pytest.raises(ValueError, match=f"b fails in {what}"):
        list(pipe.run(data, trace=observers))
    ended = {name for name, noted in log if noted == "end"}
    assert ended == ({"a"} if what == "begin" else {"a", "b", "c"})
    assert len(losses(pipe, data)) == 3


def right(output, target):
    return (output > target).double().mean()


def both(output, target):
    assert not torch.is_grad_enabled()
    return {"right": right(output, target), "sides": (output, target)}


@every_method
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_results_carry_what_was_asked_for(method, recompute, device):
    data = [(x.to(device), y.to(device)) for x, y in batches(5, size=6, last=7)]
    more = {"devices": None if device == "cpu" else ["cuda:0"] * 3, "recompute": recompute}
    parts, runs = 1 if recompute else 3, []
    for keep in (None, both):
        torch.manual_seed(4)
        stages = [
            nn.Sequential(nn.ReLU(True), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.4))
            for _ in range(3)
        ]
        pipe = st.Pipeline(stages, sgd(), mse, method, microbatches=parts, **more)
        found = list(pipe.run(data, keep=keep))
        runs.append((found, [*(r.loss for r in found), *pipe.state_dict().values()]))
    (plain, state), (results, same) = runs
    assert all(map(torch.equal, state, same))
    assert {result.kept for result in plain} == {None}
    for result, (_, y) in zip(results, data, strict=True):
        output, target = result.kept["sides"]
        assert torch.equal(target, y) and not output.requires_grad
        close(result.kept["right"], right(output, target))
        each = zip(output.tensor_split(parts), target.tensor_split(parts), strict=True)
        close(sum(mse(*part) * len(part[0]) for part in each) / len(target), result.loss)


class Counting(nn.Module):
    """A loss with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return mse(output, target)


def test_a_recomputation_leaves_the_buffers_of_a_loss_whose_outputs_are_kept():
    pipe = st.Pipeline(tanh_stages(2), sgd(), loss := Counting(), "spectrain", recompute=True)
    list(pipe.run(batches(4), keep=right))
    assert loss.calls == 4


def test_what_cannot_be_kept():
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3)
    with pytest.raises(TypeError, match="keep: expected a callable, got str"):
        pipe.run(data, keep="outputs")
    with pytest.raises(st.StageError, match="a dict or tuple of tensors, got a float; in keep"):
        list(pipe.run(data, keep=lambda output, target: 0.5))
    assert len(losses(pipe, data)) == 3
    for result in pipe.run(data, keep=right):
        assert replace(result, index=8).kept is result.kept
        assert "kept" not in repr(result)


# Losses given as sums with counts: the mean is independent of the cut

COUNTED = {"count": lambda labels: (labels != IGNORED).sum()}
AS_INT = {"count": lambda labels: int((labels != IGNORED).sum())}


def made(method="1f1b", microbatches=2, loss_fn=total_and_count, optimizer=None, **more):
    stages, optimizer = [words(0), words(1)], optimizer or sgd()
    return st.Pipeline(stages, optimizer, loss_fn, method, microbatches=microbatches, **more)


def data_without(i=None, batches=5):
    """Return minibatches; nothing counts in the i-th one."""
    data = list(sentences(batches))
    if i is not None:
        data[i][1].fill_(IGNORED)
    return data


@pytest.mark.parametrize(
    ("method", "microbatches", "more", "nothing"),
    [
        ("1f1b", 8, {"clip_norm": 0.05}, None),
        ("gpipe", 3, {"recompute": True}, None),
        ("zb-h1", 4, {}, None),
        ("sync", 1, {}, None),
        ("1f1b", 4, {**AS_INT, "clip_norm": 0.05}, None),
        # Where nothing counts there is no loss, and weights move by momentum only.
        ("1f1b", 2, {}, 2),
        ("1f1b", 2, COUNTED, 2),
    ],
)
def test_the_uncut_models_mean_whatever_microbatches_count(method, microbatches, more, nothing):
    data, pipe = data_without(nothing), made(method, microbatches, **more)
    results = list(pipe.run(data))
    model = nn.Sequential(words(0), words(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for i, (ids, labels) in enumerate(data):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        if "clip_norm" in more:
            nn.utils.clip_grad_norm_(model.parameters(), more["clip_norm"])
        optimizer.step()
        close(results[i].loss, loss.detach(), equal_nan=True)
        assert math.isnan(results[i].loss) == (i == nothing)
        if "count" not in more:
            assert int(results[i].count) == int((labels != IGNORED).sum())
    theirs = dict(model.named_parameters())
    for name, p in pipe.named_parameters():
        close(p, theirs[name])


@pytest.mark.parametrize("method", ["auto", "spectrain", "pipedream-2bw", "zb-h1"])
def test_it_is_what_means_are_where_all_microbatches_count_the_same(method):
    def pair(output, target):
        return nn.functional.mse_loss(output, target, reduction="sum"), target.numel()

    data, stages, runs = batches(6, size=6), tanh_stages(3), []
    for loss_fn in (mse, pair):
        pipe = st.Pipeline(copy.deepcopy(stages), sgd(), loss_fn, method, microbatches=3)
        runs.append([*(result.loss for result in pipe.run(data)), *pipe.parameters()])
    close(*runs)


def test_fit_and_evaluate_weigh_by_counts():
    data, pipe = data_without(1), made(optimizer=sgd(lr=0.0))
    model = nn.Sequential(words(0), words(1))
    pairs = [total_and_count(model(ids), labels) for ids, labels in data]
    expected = sum(total for total, _ in pairs).item() / sum(count for _, count in pairs).item()
    assert pipe.fit(data) == [pytest.approx(expected)]
    found = pipe.evaluate(data, {"loss": total_and_count, "mean": lambda *_: 2.0})
    assert found == {"loss": pytest.approx(expected), "mean": 2.0}
    assert math.isnan(pipe.evaluate([data[1]])["loss"])
    assert math.isnan(pipe.evaluate(data[:1], {"loss": lambda *_: (math.nan, 3)})["loss"])


@pytest.mark.parametrize("more", [{}, COUNTED])
def test_a_minibatch_of_which_nothing_counts_can_be_left_out(more):
    data, runs = data_without(2), []
    for given, on_nonfinite in ((data, "skip"), ([*data[:2], *data[3:]], None)):
        pipe = made(**with_passes({"on_nonfinite": on_nonfinite, **more}))
        list(pipe.run(given))
        runs.append(list(pipe.parameters()))
    assert all(map(torch.equal, *runs))


def test_a_loss_counts_for_all_microbatches_or_for_none():
    numbers = count()

    def alternating(output, target):
        return (output.sum(), 3) if next(numbers) % 2 else output.mean()

    with pytest.raises(st.StageError, match="for all microbatches"):
        list(made(loss_fn=alternating).run(data_without(batches=1)))


@pytest.mark.processes
def test_a_process_may_end_in_the_middle_of_a_run():
    """Torch 2.13 aborted it, as it freed the graphs of microbatches in flight."""
    program = """
import torch
import spectrain_ext as st

stages = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(4)]
sgd = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)
pipe = st.Pipeline(stages, sgd, torch.nn.functional.mse_loss, microbatches=8)
run = pipe.run([(torch.ones(16, 4), torch.ones(16, 4))] * 20)
next(run)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
