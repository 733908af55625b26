"""Tests every method, with every other setting, against its definition.

The settings are a covering array: ``oracle.cases`` lists the pairs that it must contain.
"""

from __future__ import annotations

import itertools

import pytest
from helpers.pipeline_cases import Compared, batches, every_method, mse, tanh_stages
from helpers.random_settings import method_of
from oracle.cases import AXES, FAMILY_OF, MODELS, OPTIMIZERS, REFUSED, Case
from oracle.methods import METHODS
from torch import nn

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")

ROWS = AXES.covering()


def compare(case: Case) -> None:
    """Compare beyond warm-up, over a drain and a restart."""
    compared = Compared(
        MODELS[case.model](case.stages),
        method_of(case.method),
        definition=case.definition,
        loss_fn=nn.functional.cross_entropy if case.model == "words" else mse,
        optimizer=OPTIMIZERS[case.optimizer],
        **case.options,
    )
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


def test_every_required_pair_is_drawn():
    assert not set(AXES.required) - {pair for row in ROWS for pair in AXES.pairs(row)}


@pytest.mark.parametrize("case", [Case(**row) for row in ROWS], ids=str)
def test_every_pair_of_settings(case):
    compare(case)


@pytest.mark.nightly
@pytest.mark.parametrize("method", FAMILY_OF)
def test_many_settings(method):
    for seed in range(100):
        compare(Case(**AXES.drawn(seed, method=method)))


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_eight_stages(method):
    for seed in range(10 if method != "xgrad" else 0):
        compare(Case(**AXES.drawn(seed, method=method, stages=8)))


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
        with pytest.raises(ValueError, match=message):
            st.Pipeline(
                MODELS["plain"](case.stages),
                OPTIMIZERS[case.optimizer][0],
                mse,
                method_of(case.method),
                **case.options,
            )
