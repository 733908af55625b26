"""Tests every method, also one of a user, with every other setting against its definition.

The settings are a covering array: ``oracle.cases`` lists the pairs that it must contain.
"""

from __future__ import annotations

import copy
import itertools

import hypothesis.strategies as some
import pytest
from helpers.pipeline_cases import (
    Compared,
    batches,
    every_method,
    examples,
    losses,
    mse,
    sgd,
    tanh_stages,
)
from helpers.random_settings import method_of
from hypothesis import example, given
from oracle.cases import AXES, FAMILY_OF, MODELS, OPTIMIZERS, RATES, REFUSED, Case
from oracle.methods import METHODS, Definition
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

import spectrain_ext as st
from spectrain_ext.method import Method, find_method

pytestmark = pytest.mark.usefixtures("float64")

ROWS = AXES.covering()


def compare(case: Case) -> None:
    """Compare beyond warm-up, over a drain and a restart."""
    stages, method = MODELS[case.model](case.stages), method_of(case.method)
    loss_fn = nn.functional.cross_entropy if case.model == "words" else mse
    more = {"definition": case.definition, "optimizer": OPTIMIZERS[case.optimizer]}
    compared = Compared(stages, method, loss_fn=loss_fn, **more, **case.options)
    until_steady = -(-max(case.windows) // case.m)
    for count in (1, 0, 3) if case.runs == "short" else (until_steady + 2, 2):
        compared.run(case.batches(count))
        if case.runs == "left":
            compared.leave(case.batches(4), 1)
        if count:
            compared.check_rates()
        if case.rates == "by hand":
            for optimizer in (*compared.pipe.optimizers, *filter(None, compared.oracle.optimizers)):
                for group in optimizer.param_groups:
                    group["lr"] /= 2


def test_the_oracle_knows_every_method():
    assert sorted(st.methods()) == sorted(METHODS)
    assert set(METHODS) <= set(FAMILY_OF)


def test_auto_is_the_default_and_says_what_it_does(caplog):
    """Without a momentum it goes by the last change."""
    with caplog.at_level("INFO", "spectrain_ext"):
        pipe = st.Pipeline(tanh_stages(4), sgd(momentum=0.0), mse)
    assert pipe.method is find_method("auto")
    assert [place.microbatches for place in pipe.places] == [4] * 4
    assert "by the difference law" in caplog.text


def test_every_required_pair_is_drawn():
    assert not set(AXES.required) - {pair for row in ROWS for pair in AXES.pairs(row)}


@pytest.mark.parametrize("case", [Case(**row) for row in ROWS], ids=str)
def test_every_pair_of_settings(case):
    compare(case)


def test_a_run_begins_with_the_weights_that_an_optimizers_mode_puts_in_place():
    """Backwards look back to the weights at the beginning, which are in no buffer but the first."""
    row = {"method": "pipemare-t2", "stages": 5, "microbatches": 1, "window": "classic"}
    compare(Case(**row, optimizer="foreign ScheduleFree"))


@pytest.mark.nightly
@pytest.mark.parametrize("method", FAMILY_OF)
def test_many_settings(method):
    for seed in range(100):
        more = {"stages": 8} if seed % 10 == 0 and method != "xgrad" else {}
        compare(Case(**AXES.drawn(seed, method=method, **more)))


@every_method
def test_momentum_that_cycles_with_the_rate(method):
    def both(optimizer):
        return OneCycleLR(optimizer, max_lr=0.05, total_steps=14)

    compared = Compared(tanh_stages(3), method, scheduler=both)
    for count in (6, 3):
        compared.run(batches(count))
        found, expected = compared.pipe.optimizers[0], compared.oracle.optimizers[0]
        momentum = found.param_groups[0]["momentum"]
        assert momentum == expected.param_groups[0]["momentum"] != 0.9


@every_method
def test_rates_that_a_metric_reduces_between_runs(method):
    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)

    stages, data = tanh_stages(3), batches(9)
    measured, by_hand = (
        st.Pipeline(copy.deepcopy(stages), sgd(), mse, method, scheduler=scheduler)
        for scheduler in (plateau, None)
    )
    for first, rate in ((0, 0.05), (3, 0.05), (6, 0.025)):
        assert [o.param_groups[0]["lr"] for o in measured.optimizers] == [rate] * 3
        for optimizer in by_hand.optimizers:
            optimizer.param_groups[0]["lr"] = rate
        assert losses(measured, data[first : first + 3]) == losses(by_hand, data[first : first + 3])
        loss = measured.evaluate(data)["loss"]  # falls, which is worse
        for each in measured.schedulers:
            each.step(loss)
    with pytest.raises(RuntimeError, match="step: a run of the pipeline has not ended"):
        for _ in measured.run(data):
            measured.schedulers[0].step(0.0)


@every_method
def test_a_long_run(method):
    """The buffers of versions are used in turn many times."""
    compared = Compared(tanh_stages(4), method)
    compared.run(batches(40))
    compared.run(batches(5))


@pytest.mark.parametrize(("one", "other", "message"), REFUSED, ids=range(len(REFUSED)))
def test_pairs_that_do_not_exist_are_refused(one, other, message):
    for x, y in itertools.product(one[1], other[1]):
        case = Case(**{"stages": 1 if x == "xgrad" else 2, one[0]: x, other[0]: y})
        stages, optimizer = MODELS["plain"](case.stages), OPTIMIZERS[case.optimizer][0]
        with pytest.raises(ValueError, match=message):
            st.Pipeline(stages, optimizer, mse, method_of(case.method), **case.options)


# Unregistered methods: any consistent one


def method_of_choices(choices):
    """Return in the package's terms what ``Definition(**choices)`` is in the oracle's."""
    names = {"reads": "forward_reads", "forward": "forward_horizon"}
    fields = {
        names.get(key, key): (lambda place, x=x: x(*place[:4])) if callable(x) else x
        for key, x in choices.items()
    }
    return Method("own", "of a test", **fields)


@some.composite
def choices(draw):
    """Draw any consistent method with the asynchronous schedule."""
    small, differing = some.integers(0, 3), some.booleans()
    rules = some.builds(lambda s, d: lambda k, *rest: s + d * ((k + 1) % 3), small, differing)
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
    elif law == "difference":
        found["forward"] = draw(rules)
    return found


WITH_MOMENTUM = ("momentum", "nesterov", "average", "decoupled", "groups", "Adam", "AdamW", "NAdam")


# The backward computed with its forward's weights, which are older.
UNPREDICTED = {"reads": "newest", "forward": lambda *_: 0, "once": True, "backward": "current"}


@examples(20)
@example({**UNPREDICTED, "law": "linear"}, 2, 2, [5], "momentum", "constant", [0, 0, 0, 1])
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
    stages, method = tanh_stages(n, width=4, layers=1), method_of_choices(chosen)
    more = {"optimizer": OPTIMIZERS[optimizer], "scheduler": RATES[rates], "window": windows}
    more |= {"definition": Definition(**chosen), "microbatches": m}
    compared = Compared(stages, method, **more)
    for count in counts:
        compared.run(batches(count, size=m + 1, width=4, last=max(1, m - 1) if count else None))
