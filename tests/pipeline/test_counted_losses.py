"""Tests losses given as sums with counts: the mean is independent of the cut."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from helpers.pipeline_cases import batches, close, float64, mse, sgd, tanh_stages  # noqa: F401
from helpers.replica_programs import IGNORED, sentences, total_and_count, words
from torch import nn

import spectrain_ext as st

COUNTED = {"count": lambda labels: (labels != IGNORED).sum()}
AS_INT = {"count": lambda labels: int((labels != IGNORED).sum())}


def made(method="1f1b", microbatches=2, loss_fn=total_and_count, optimizer=None, **more):
    stages, optimizer = [words(0), words(1)], optimizer or sgd()
    return st.Pipeline(stages, optimizer, loss_fn, method, microbatches=microbatches, **more)


def data_without(i=None, count=5):
    """Return minibatches; nothing counts in the i-th one."""
    data = list(sentences(count))
    if i is not None:
        data[i][1].fill_(IGNORED)
    return data


@pytest.mark.parametrize(
    ("method", "microbatches", "more", "nothing"),
    [
        ("1f1b", 4, {}, None),
        ("1f1b", 8, {"clip_norm": 0.05}, None),
        ("gpipe", 3, {"recompute": True}, None),
        ("zb-h1", 4, {}, None),
        ("sync", 1, {}, None),
        ("1f1b", 8, COUNTED, None),
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
        pipe = made(on_nonfinite=on_nonfinite, **more)
        list(pipe.run(given))
        runs.append(list(pipe.parameters()))
    assert all(map(torch.equal, *runs))


CALLS = itertools.count()


def alternating(output, target):
    return output.mean() if next(CALLS) % 2 else (output.sum(), 3)


@pytest.mark.parametrize(
    ("loss_fn", "match"),
    [
        (lambda o, t: (o.sum(), "3"), "must be a number or a 0-d tensor, got str"),
        (lambda o, t: (o.sum(), t[:2, 0]), r"a number or a 0-d tensor, got shape \(2,\)"),
        (lambda o, t: (o.sum(), 1, 2), r"a 0-d tensor, or a pair \(sum, count\), got a tuple"),
        (alternating, "for all microbatches"),
    ],
)
def test_what_a_loss_may_not_be(loss_fn, match):
    with pytest.raises(st.StageError, match=match):
        list(made(loss_fn=loss_fn).run(data_without(count=1)))
