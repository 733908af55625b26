"""Tests unregistered methods: any consistent Method computes the result of the oracle's row."""

from __future__ import annotations

import copy

import hypothesis.strategies as some
import pytest
import torch
from helpers.foreign_optimizers import FOREIGN
from helpers.pipeline_cases import Compared, batches, examples, losses, mse, sgd, tanh_stages
from hypothesis import given
from oracle.cases import OPTIMIZERS, RATES
from oracle.methods import Definition

import spectrain_ext as st
from spectrain_ext.method import Method, find_method, in_words

pytestmark = pytest.mark.usefixtures("float64")


def method_and_definition(name="own", **choices):
    """Return the same choices in the package's terms (rules of a place) and in the oracle's."""

    def at(rule):
        return rule if isinstance(rule, str) else lambda place: rule(*place[:4])

    fields = {
        "schedule": "schedule",
        "reads": "forward_reads",
        "law": "law",
        "forward": "forward_horizon",
        "backward": "backward",
        "backward_horizon": "backward_horizon",
        "lead": "lead",
        "once": "once",
    }
    rules = ("forward", "backward_horizon", "lead")
    given_fields = {
        fields[key]: at(value) if key in rules else value for key, value in choices.items()
    }
    return Method(name, "of a test", **given_fields), Definition(**choices)


@pytest.mark.parametrize("optimizer", [sgd(momentum=0.0), FOREIGN["AdamW"]])
def test_auto_without_momentum_says_that_it_goes_by_the_last_change(optimizer):
    pipe = st.Pipeline(tanh_stages(4), optimizer, mse, "auto", microbatches=2)
    assert "by the difference law" in in_words(pipe.method, pipe.places, pipe.optimizers[0])


def test_auto_is_what_a_pipeline_does_by_default(caplog):
    stages = tanh_stages(4)
    other = st.Pipeline(copy.deepcopy(stages), sgd(), mse, "second-order", microbatches=4)
    with caplog.at_level("INFO", "spectrain_ext"):
        pipe = st.Pipeline(stages, sgd(), mse)
    assert pipe.method is find_method("auto")
    assert [place.microbatches for place in pipe.places] == [4] * 4
    assert in_words(pipe.method, pipe.places) in caplog.text
    data = batches(6)
    for found, expected in zip(losses(pipe, data), losses(other, data), strict=True):
        assert torch.equal(found, expected)


def constant(s):
    return lambda *place: s


def by_stage(s):
    return lambda k, *rest: s + (k + 1) % 3


@some.composite
def choices(draw):
    """Draw any consistent method with the asynchronous schedule."""
    rules = some.builds(lambda make, s: make(s), some.sampled_from((constant, by_stage)), small)
    found = {
        "reads": draw(some.sampled_from(("newest", "newest", "newest", "entry", "previous"))),
        "backward": draw(some.sampled_from(("current", "predict", "stash"))),
    }
    if found["backward"] == "predict":
        found["backward_horizon"] = draw(rules)
    laws = ("linear", "geometric", "second-order", "difference")
    found["law"] = law = draw(some.sampled_from(laws))
    if found["reads"] == "newest":
        found["forward"] = draw(rules if law == "second-order" else rules | some.just("counted"))
        found["once"] = draw(some.booleans())
        if law == "second-order":
            found["lead"] = draw(rules)
    return found


small = some.integers(0, 3)
WITH_MOMENTUM = ("momentum", "nesterov", "average", "decoupled", "groups", "Adam", "AdamW", "NAdam")


@examples(20)
@given(
    chosen=choices(),
    n=some.integers(1, 4),
    m=some.integers(1, 3),
    counts=some.lists(some.integers(0, 6), min_size=1, max_size=2),
    optimizer=some.sampled_from(WITH_MOMENTUM),
    rates=some.sampled_from(sorted(RATES)),
    steps=some.lists(some.integers(0, 3), min_size=4, max_size=4),
)
def test_any_method(chosen, n, m, counts, optimizer, rates, steps):
    # A later stage must not have more in flight than an earlier one.
    windows = [1 + sum(steps[k:]) for k in range(n)]
    if chosen["reads"] == "previous":
        windows = [min(w, m + 1) for w in windows]
    method, definition = method_and_definition(**chosen)
    compared = Compared(
        tanh_stages(n, width=4, layers=1),
        method,
        definition=definition,
        optimizer=OPTIMIZERS[optimizer],
        scheduler=RATES[rates],
        microbatches=m,
        window=windows,
    )
    for count in counts:
        compared.run(batches(count, size=m + 1, width=4, last=max(1, m - 1) if count else None))
