"""Tests every registered method against its definition, wherever it is defined."""

from __future__ import annotations

import random

import pytest
from helpers.pipeline_cases import (
    Compared,
    batches,
    float64,  # noqa: F401  # a fixture
    tanh_stages,
)
from oracle.cases import OPTIMIZERS, SCHEDULERS, covering_cases, every_case
from oracle.methods import METHODS

import spectrain_ext as st


def compare(case):
    """Compare beyond warm-up, over a drain and a restart, with a small last minibatch."""
    kind, reference, options = OPTIMIZERS[case.optimizer]
    compared = Compared(
        tanh_stages(case.stages, width=4, layers=1),
        case.method,
        optimizer=(lambda p: kind(p, **options), lambda p: reference(p, **options)),
        scheduler=SCHEDULERS[case.rates],
        microbatches=case.m,
        **({} if case.asked is None else {"window": case.asked}),
    )
    until_steady = -(-max(case.windows) // case.m)
    size, small = case.m + 1, max(1, case.m - 1)
    compared.run(batches(until_steady + 3, size=size, width=4, last=small))
    compared.run(batches(2, size=size, width=4))


def test_the_oracle_knows_every_method():
    assert sorted(st.methods()) == sorted(METHODS)


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_every_pair_of_settings(case):
    compare(case)


@pytest.mark.nightly
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("method", METHODS)
def test_many_settings(method, n):
    """Rates change, because a constant rate could hide which update's rate was used.

    This is a third of all settings; it took three hours.
    """
    if n > METHODS[method].stages:
        pytest.skip(f"{method} is not defined for {n} stages")
    rows = (method, n, "decaying")
    cases = [case for case in every_case() if (case.method, case.stages, case.rates) == rows]
    for case in random.Random(f"{method} {n}").sample(cases, min(len(cases), 32)):
        compare(case)
