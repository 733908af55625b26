"""Tests how ranks join: on one address, past what earlier starts left, and errors that name it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.cli_programs import listening
from helpers.ranks import run_ranks

import spectrain_ext as st


def launch(monkeypatch, address, port, **more):
    """Set what a launcher sets for rank 0 of 2."""
    given = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    for name, value in {**given, **more}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_rank_0_listens_on_the_address_alone(address, monkeypatch):
    launch(monkeypatch, address, 0, WORLD_SIZE="1")
    before = listening()
    try:
        assert st.join_ranks() == (0, 1)
        found = listening()
    finally:
        dist.destroy_process_group()
    for other in before:
        found.remove(other)
    assert {*found} & ({"127.0.0.1", "::1"} if address == "localhost" else {address})
    assert {*found} <= {"127.0.0.1", "::1", address}  # the group's own, too


def test_where_rank_0_cannot_listen_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, reason in (
            ("127.0.0.1", f"127.0.0.1, port {port}: Address already in use"),
            ("192.0.2.1", f"192.0.2.1, port {port}: Cannot assign"),
            ("no-such-host.invalid", f"no-such-host.invalid, port {port}: "),
        ):
            launch(monkeypatch, address, port)
            with pytest.raises(OSError, match=f"MASTER_ADDR and .* on {reason}"):
                st.join_ranks()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MASTER_ADDR": "far.invalid", "LOCAL_WORLD_SIZE": "1"}, None),
        ({"MASTER_ADDR": "far.invalid", "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ({"MASTER_ADDR": "localhost"}, "lo"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
)
def test_one_machine_stays_on_loopback(environment, expected, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launch(monkeypatch, "127.0.0.1", taken.getsockname()[1], **environment)
        with pytest.raises(OSError, match="MASTER_ADDR"):
            st.join_ranks()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_who_has_not_come_is_named_and_what_no_launcher_has_set(monkeypatch):
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for rank, said in (("0", "rank 1 of 2 has not come"), ("1", "rank 1 has had no answer")):
        launch(monkeypatch, "127.0.0.1", kept.port, RANK=rank)
        with pytest.raises(TimeoutError, match=rf"{said}.* within 0\.3 s"):
            st.join_ranks(timeout=timedelta(seconds=0.3))
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match="expected WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the"):
        st.join_ranks()


def join_again(rank, ranks, port):
    """Return this rank, their number and their sum in several starts that share a store."""
    dist.destroy_process_group()  # the test's group
    store, found = dist.TCPStore("127.0.0.1", port, is_master=False), []
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")

    def all_have(what):
        store.set(f"{what} {rank}", "")
        store.wait([f"{what} {each}" for each in range(ranks)])

    for start, count in enumerate(STARTS):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))
        if rank < count:
            if rank == 0 and count > 1:  # the others see the earlier content
                store.wait([f"{start} has begun"])
            store.set(f"{start} has begun", "")
            joined = st.join_ranks(timeout=timedelta(seconds=60))
            total = torch.tensor(float(start))
            dist.all_reduce(total)
            found.append((*joined, total.item()))
            dist.destroy_process_group()
        all_have(f"{start} has ended")
        if rank == 2:  # expected by no other rank
            os.environ.update(WORLD_SIZE="3")
            with pytest.raises(TimeoutError):
                st.join_ranks(timeout=timedelta(seconds=0.1))
        all_have(f"{start} has been disturbed")
    return found


STARTS = (3, 2, 4, 1)


@pytest.mark.processes
def test_ranks_meet_whatever_the_store_has_of_earlier_starts():
    """The earlier starts had other numbers of ranks, and some ended right after joining."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, found in enumerate(run_ranks(join_again, 4, kept.port)):
        expected = [(rank, n, float(k * n)) for k, n in enumerate(STARTS) if rank < n]
        assert found == expected
