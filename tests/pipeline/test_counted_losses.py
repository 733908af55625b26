"""Tests losses given as sums with counts: the mean is independent of the cut."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.pipeline_cases import batches as plain_batches
from helpers.pipeline_cases import close, float64, mse, sgd, tanh_stages  # noqa: F401
from helpers.replica_programs import IGNORED, sentences, total_and_count, words
from torch import nn

import spectrain_ext as st


def mean(output, labels):
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def uncut(data, clip_norm=None, loss_fn=mean):
    """Train by the mean over the whole minibatch; return (losses, the model)."""
    model = nn.Sequential(words(0), words(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for ids, labels in data:
        optimizer.zero_grad()
        losses.append(loss_fn(model(ids), labels))
        losses[-1].backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return losses, model


def check(pipe, results, losses, model):
    for result, loss in zip(results, losses, strict=True):
        torch.testing.assert_close(
            result.loss, loss.detach(), rtol=1e-9, atol=1e-12, equal_nan=True
        )
    theirs = dict(model.named_parameters())
    for name, p in pipe.named_parameters():
        close(p, theirs[name])


@pytest.mark.parametrize(
    ("method", "microbatches", "more"),
    [
        ("1f1b", 4, {}),
        ("1f1b", 8, {"clip_norm": 0.05}),
        ("gpipe", 3, {"recompute": True}),
        ("zb-h1", 4, {}),
        ("sync", 1, {}),
        ("1f1b", 8, {"count": lambda labels: (labels != IGNORED).sum()}),
        ("1f1b", 4, {"count": lambda labels: int((labels != IGNORED).sum()), "clip_norm": 0.05}),
    ],
)
def test_the_uncut_models_mean_whatever_microbatches_count(method, microbatches, more):
    data = list(sentences())
    pipe = st.Pipeline(
        [words(0), words(1)], sgd(), total_and_count, method, microbatches=microbatches, **more
    )
    results = list(pipe.run(data))
    check(pipe, results, *uncut(data, more.get("clip_norm")))
    if "count" not in more:
        assert [int(each.count) for each in results] == [
            int((labels != IGNORED).sum()) for _, labels in data
        ]


@pytest.mark.parametrize("more", [{}, {"count": lambda labels: (labels != IGNORED).sum()}])
def test_a_minibatch_of_which_nothing_counts_has_no_loss_and_moves_nothing_but_by_momentum(more):
    data = list(sentences())
    data[2][1].fill_(IGNORED)
    pipe = st.Pipeline([words(0), words(1)], sgd(), total_and_count, "1f1b", microbatches=2, **more)
    results = list(pipe.run(data))
    assert math.isnan(results[2].loss)
    check(pipe, results, *uncut(data))


def test_without_a_flush_it_is_what_means_are_where_all_microbatches_count_the_same():
    data = plain_batches(6, size=6)

    def pair(output, target):
        return nn.functional.mse_loss(output, target, reduction="sum"), target.numel()

    stages = tanh_stages(3)
    for method in ("auto", "spectrain", "pipedream-2bw", "zb-h1"):
        expected = st.Pipeline(copy.deepcopy(stages), sgd(), mse, method, microbatches=3)
        pipe = st.Pipeline(copy.deepcopy(stages), sgd(), pair, method, microbatches=3)
        for one, other in zip(pipe.run(data), expected.run(data), strict=True):
            close(one.loss, other.loss)
        for one, other in zip(pipe.parameters(), expected.parameters(), strict=True):
            close(one, other)


def test_fit_and_evaluate_weigh_by_counts():
    data = list(sentences())
    data[1][1].fill_(IGNORED)
    pipe = st.Pipeline([words(0), words(1)], sgd(lr=0.0), total_and_count, "1f1b", microbatches=2)
    model = nn.Sequential(words(0), words(1))
    pairs = [total_and_count(model(ids), labels) for ids, labels in data]
    expected = sum(total for total, _ in pairs).item() / sum(count for _, count in pairs).item()
    assert pipe.fit(data) == [pytest.approx(expected)]
    found = pipe.evaluate(data, {"loss": total_and_count, "mean": lambda *_: 2.0})
    assert found == {"loss": pytest.approx(expected), "mean": 2.0}
    assert math.isnan(pipe.evaluate([data[1]])["loss"])
    nothing, _ = data[0]
    assert math.isnan(
        pipe.evaluate([(nothing, data[0][1])], {"loss": lambda *_: (math.nan, 3)})["loss"]
    )


def test_what_a_loss_may_not_be():
    data = list(sentences(1))

    def run(loss_fn, **more):
        pipe = st.Pipeline([words(0), words(1)], sgd(), loss_fn, "1f1b", microbatches=2, **more)
        list(pipe.run(data))

    calls = iter([True, False])
    for match, loss_fn in (
        ("must be a number or a 0-d tensor, got str", lambda o, t: (o.sum(), "3")),
        (r"must be a number or a 0-d tensor, got shape \(2,\)", lambda o, t: (o.sum(), t[:2, 0])),
        ("for all microbatches", lambda o, t: (o.sum(), 3) if next(calls) else o.mean()),
        (r"a 0-d tensor, or a pair \(sum, count\), got a tuple", lambda o, t: (o.sum(), 1, 2)),
    ):
        with pytest.raises(st.StageError, match=match):
            run(loss_fn)
    with pytest.raises(TypeError, match="count: expected a callable, got int"):
        run(total_and_count, count=3)


@pytest.mark.parametrize("more", [{}, {"count": lambda labels: (labels != IGNORED).sum()}])
def test_a_minibatch_of_which_nothing_counts_can_be_left_out(more):
    data = list(sentences())
    data[2][1].fill_(IGNORED)

    def run(batches, **given):
        stages = [words(0), words(1)]
        pipe = st.Pipeline(stages, sgd(), total_and_count, "1f1b", microbatches=2, **more, **given)
        list(pipe.run(batches))
        return [p.detach().clone() for p in pipe.parameters()]

    found = run(data, on_nonfinite="skip")
    for one, other in zip(found, run([*data[:2], *data[3:]]), strict=True):
        assert torch.equal(one, other)
