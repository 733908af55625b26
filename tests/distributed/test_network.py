"""Tests a pipeline whose link breaks without a word: two network namespaces with a link between."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.failing_runs import TIMEOUT
from helpers.rank_cases import Case
from helpers.ranks import Ranks, printed_by

import spectrain_ext as st

pytestmark = [pytest.mark.network, pytest.mark.processes]
HOSTS = [f"st{os.getpid()}n{side}" for side in (1, 2)]  # namespaces, and their ends of the link
_CLONE_NEWNET = 0x40000000


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    try:
        for host in HOSTS:
            ip(f"netns add {host}")
        ip("link add {0} netns {0} type veth peer name {1} netns {1}".format(*HOSTS))
        for side, host in enumerate(HOSTS, 1):
            ip(f"-n {host} addr add 10.213.0.{side}/24 dev {host}")
            ip(f"-n {host} link set lo up")
            ip(f"-n {host} link set {host} up")
        yield HOSTS
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs two network namespaces: {getattr(error, 'stderr', error)}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def train_on(rank: int, ranks: int, hosts: list[str], mark: str) -> None:
    """Train until stopped; open a FIFO when the test may stop it."""
    dist.destroy_process_group()  # the test's group, on this host
    host = hosts[rank == ranks - 1]
    with open(f"/run/netns/{host}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
    os.environ.update(GLOO_SOCKET_IFNAME=host, RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="10.213.0.1", MASTER_PORT="29500")
    st.join_ranks()
    case = Case("vanilla", (ranks, 1))
    pipe = case.pipeline(rank, microbatches=1, timeout=TIMEOUT)
    for result in pipe.run(itertools.cycle(case.batches([16]))):
        if rank == ranks - 1 and result.index == 20:
            with open(mark, "w"):
                pass


def test_a_cut_link_ends_all_ranks(tmp_path: Path, hosts: list[str]) -> None:
    mark = tmp_path / "mark"
    os.mkfifo(mark)
    ranks = Ranks(train_on, 3, hosts, str(mark))
    with mark.open():  # until the last rank has received the minibatches
        pass
    ip(f"-n {hosts[1]} link set {hosts[1]} down")
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
