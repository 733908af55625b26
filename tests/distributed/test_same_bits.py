"""Tests that a pipeline over ranks is the pipeline of one process, to the bit, in all settings."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import rank_cases
from helpers.rank_cases import METHODS, SETTINGS, Case, alone, on_ranks, same
from helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

nightly = pytest.mark.nightly
SEEDS = [0, *(pytest.param(seed, marks=nightly) for seed in range(1, 6))]
covering = cache(rank_cases.covering)
#: Once wrong: two copies of a weight on one rank mixed their versions; a phase that sends checks
#: with its gradients could not follow one that does not. The last has modes, of a copy too.
PINNED = [
    *(Case("zb-h1-async", (2, 2), ties="three"), Case("1f1b+vanilla@8", (2, 1), clip="skips")),
    Case("lwp-w", (2, 1), ties="two", optimizer="modes"),
]


def test_every_method_and_every_pair_of_settings_is_drawn():
    drawn = set().union(*(SETTINGS.pairs(vars(case)) for case in covering(0)))
    assert drawn == SETTINGS.required.keys()
    assert {case.method for case in covering(0)} == {*METHODS}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_train_as_one_process(ranks, seed):
    check([case for case in [*PINNED, *covering(seed)] if case.ranks == ranks])


@nightly
@pytest.mark.parametrize("layout", rank_cases.AXES["layout"], ids=str)
def test_every_method_in_every_layout(layout):
    check([Case(method, layout, form="tuple", losses="shared") for method in METHODS])


def check(cases):
    torch.set_num_threads(1)
    found = run_ranks(on_ranks, cases[0].ranks, cases)
    for case, *of_ranks in zip(cases, *found, strict=True):
        expected = alone(case)
        for rank, mine in enumerate(of_ranks):
            where = f"{case}, rank {rank}"
            same(mine["all"], expected["all"], where)
            stages = [k for k in mine if isinstance(k, int)]
            assert stages == list(range(rank, case.n, case.ranks))
            for k in stages:
                same(mine[k], expected[k], f"{where}, stage {k}")
            last, whole = mine["last"], expected["last"]
            if case.n - 1 in stages:
                same(last, whole, where)
                continue
            assert last["kept"] == [None] * len(whole["kept"]), where
            assert last["output"] is None, where
            losses = whole["losses"] if case.losses == "shared" else last["kept"]
            same(last["losses"], losses, where)
