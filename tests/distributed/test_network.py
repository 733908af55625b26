"""Tests pipelines over a link that is slow, loses packets, or breaks."""

from __future__ import annotations

import itertools
import os
import re

import pytest
import torch
from helpers.failing_runs import TIMEOUT, expect_one_end, fail, trial
from helpers.rank_cases import Case, alone, on_ranks, same
from helpers.ranks import Ranks, printed_by, run_ranks
from helpers.slow_link import SlowLink

pytestmark = [pytest.mark.network, pytest.mark.processes]


@pytest.fixture
def link(request):
    try:
        made = SlowLink(0.02, 0.01).__enter__()
    except OSError as error:
        pytest.skip(f"needs two network namespaces: {error}")
    yield made
    made.__exit__(None, None, None)


def test_the_same_bits_over_a_slow_link_that_loses_packets(link):
    torch.set_num_threads(1)
    near, far = link.hosts
    cases = [Case(method, (3, 1)) for method in ("spectrain", "1f1b")]
    found = run_ranks(on_ranks, 3, cases, keeper=False, hosts=(near, near, far))
    for case, *of_ranks in zip(cases, *found, strict=True):
        expected = alone(case)
        for rank, mine in enumerate(of_ranks):
            same([mine["all"], mine[rank]], [expected["all"], expected[rank]], str(case))
        same(of_ranks[-1]["last"], expected["last"], str(case))


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n == 3 else pytest.mark.nightly) for n in range(20)],
)
def test_one_end_for_all_over_a_slow_link_that_loses_packets(link, seed):
    """The last rank is far from the others and from the store."""
    count, what = trial(seed)
    near, far = link.hosts
    hosts = (*[near] * (count - 1), far)
    expect_one_end(Ranks(fail, count, what, keeper=False, hosts=hosts), what)


def train_on(rank, ranks, mark):
    """Train until stopped; open a FIFO when the test may stop it."""
    case = Case("vanilla", (ranks, 1))
    pipe = case.pipeline(rank, microbatches=1, timeout=TIMEOUT)
    for result in pipe.run(itertools.cycle(case.batches([16]))):
        if rank == ranks - 1 and result.index == 20:
            with open(mark, "w"):
                pass


def test_a_cut_link_ends_all_ranks(tmp_path, link):
    near, far = link.hosts
    mark = tmp_path / "mark"
    os.mkfifo(mark)
    ranks = Ranks(train_on, 3, str(mark), keeper=False, hosts=(near, near, far))
    with mark.open():  # until the last rank has received the minibatches
        pass
    link.cut()
    ends = ranks.join(deadline=60.0)
    told = printed_by(ends)
    assert [end.code for end in ends] == [1, 1, 1], told
    assert "waiting on edge 2 -> 1 " in ends[1].error, told
    assert "waiting on edge 1 -> 2 " in ends[2].error, told
    for end in ends[:2]:
        assert "first cause: rank 2, " in end.error, told
    for end in ends:
        for waited in re.findall(r"waiting on .*? for ([0-9.]+) s", end.error):
            assert float(waited) < TIMEOUT + 10, told
