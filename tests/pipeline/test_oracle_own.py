"""Tests unregistered methods: any consistent Method computes the result of the oracle's row."""

from __future__ import annotations

import copy

import hypothesis.strategies as some
import pytest
import torch
from helpers.foreign_optimizers import FOREIGN
from helpers.pipeline_cases import (
    Compared,
    batches,
    examples,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from hypothesis import given
from oracle.cases import OPTIMIZERS
from oracle.methods import AUTO, Definition, local
from torch.optim import lr_scheduler

import spectrain_ext as st
from spectrain_ext.method import Method, in_words
from spectrain_ext.method import find_method as st_method


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


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(
    "optimizer",
    [(sgd(momentum=0.0), torch_sgd(momentum=0.0)), (FOREIGN["AdamW"],) * 2],
    ids=["no momentum", "torch's"],
)
def test_auto_without_momentum_goes_by_the_last_change_of_the_weights(parts, optimizer):
    """The horizon is that with momentum, which the registered methods cover."""

    def ahead(k, n, w, m):
        return -(-(w + k - 1) // m) - local(k, n, w, m) // 2

    definition = Definition(law="difference", forward=ahead, backward="stash", rates=AUTO.rates)
    compared = Compared(
        tanh_stages(4), "auto", definition=definition, optimizer=optimizer, microbatches=parts
    )
    assert "by the difference law" in in_words(
        compared.pipe.method, compared.pipe.places, compared.pipe.optimizers[0]
    )
    compared.run(batches(9))
    compared.run(batches(5))


def test_auto_is_what_a_pipeline_does_by_default(caplog):
    stages = tanh_stages(4)
    other = st.Pipeline(copy.deepcopy(stages), sgd(), mse, "second-order", microbatches=4)
    with caplog.at_level("INFO", "spectrain_ext"):
        pipe = st.Pipeline(stages, sgd(), mse)
    assert pipe.method is st_method("auto")
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
SCHEDULERS = (
    None,
    lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    lambda opt: lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
    lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=7),
)


@examples(20)
@given(
    chosen=choices(),
    n=some.integers(1, 4),
    m=some.integers(1, 3),
    counts=some.lists(some.integers(0, 6), min_size=1, max_size=2),
    optimizer=some.sampled_from(sorted(OPTIMIZERS)),
    scheduler=some.sampled_from(SCHEDULERS),
    steps=some.lists(some.integers(0, 3), min_size=4, max_size=4),
)
def test_any_method(chosen, n, m, counts, optimizer, scheduler, steps):
    # A later stage must not have more in flight than an earlier one.
    windows = [1 + sum(steps[k:]) for k in range(n)]
    if chosen["reads"] == "previous":
        windows = [min(w, m + 1) for w in windows]
    method, definition = method_and_definition(**chosen)
    kind, reference, options = OPTIMIZERS[optimizer]
    compared = Compared(
        tanh_stages(n, width=4, layers=1),
        method,
        definition=definition,
        optimizer=(lambda p: kind(p, **options), lambda p: reference(p, **options)),
        scheduler=scheduler,
        microbatches=m,
        window=windows,
    )
    for count in counts:
        compared.run(batches(count, size=m + 1, width=4, last=max(1, m - 1) if count else None))
