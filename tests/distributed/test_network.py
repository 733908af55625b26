"""Tests pipelines over a link that is slow, loses packets, or breaks."""

from __future__ import annotations

import os
import re
import threading
import time

import pytest
import torch
from helpers import rank_pipelines
from helpers.failing_runs import TIMEOUT, expect_one_end, trial
from helpers.ranks import Ranks, run_ranks
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


def test_the_link_is_as_slow_as_it_says(link):
    """A connection takes a round trip, and every byte one way."""
    there, here = link.hosts
    ready = threading.Event()
    took = []

    def answer():
        there.enter()  # this thread only
        import socket

        with socket.create_server((there.address, 5000)) as server:
            ready.set()
            made, _ = server.accept()
            with made:
                made.sendall(made.recv(1))

    def ask():
        here.enter()
        import socket

        ready.wait()
        begin = time.monotonic()
        with socket.create_connection((there.address, 5000)) as made:
            made.sendall(b"x")
            made.recv(1)
        took.append(time.monotonic() - begin)

    threads = [threading.Thread(target=target, daemon=True) for target in (answer, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert took[0] >= 0.08


def test_the_same_bits_over_a_slow_link_that_loses_packets(link):
    torch.set_num_threads(1)
    methods, runs = ["spectrain", "1f1b"], [(9, 8, 5), (3,)]
    near, far = link.hosts
    found = run_ranks(rank_pipelines.apart, 3, methods, runs, keeper=False, hosts=(near, near, far))
    for method in methods:
        losses, states, _ = rank_pipelines.together(method, 3, runs)
        assert found[-1][method][0] == losses
        for rank in range(3):
            state = found[rank][method][1]
            assert state.keys() == states[rank].keys()
            assert all(torch.equal(state[key], states[rank][key]) for key in state)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n == 3 else pytest.mark.nightly) for n in range(60)],
)
def test_one_end_for_all_over_a_slow_link_that_loses_packets(link, seed):
    """As in test_failures.py, with the last rank far from the others and from the store."""
    count, what = trial(seed)
    near, far = link.hosts
    hosts = (*[near] * (count - 1), far)
    expect_one_end(Ranks(rank_pipelines.failing, count, what, keeper=False, hosts=hosts), what)


def test_a_cut_link_ends_all_ranks(tmp_path, link):
    near, far = link.hosts
    mark = tmp_path / "mark"
    os.mkfifo(mark)
    ranks = Ranks(
        rank_pipelines.endless, 3, TIMEOUT, str(mark), 20, keeper=False, hosts=(near, near, far)
    )
    with mark.open():  # until the last rank has received the minibatches
        pass
    link.cut()
    ends = ranks.join(deadline=60.0)
    told = "\n".join(f"rank {rank}: {end.code}\n{end.error}" for rank, end in enumerate(ends))
    assert [end.code for end in ends] == [1, 1, 1], told
    assert "waiting on edge 2 -> 1 " in ends[1].error, told
    assert "waiting on edge 1 -> 2 " in ends[2].error, told
    for end in ends[:2]:
        assert "first cause: rank 2, " in end.error, told
    for end in ends:
        for waited in re.findall(r"waiting on .*? for ([0-9.]+) s", end.error):
            assert float(waited) < TIMEOUT + 10, told
