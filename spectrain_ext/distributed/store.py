"""Store: where the ranks of a launcher meet, and what a process group is made with."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta
from functools import cache
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

#: Seconds that new connections to a store may take. Torch asks a name server for the name of each
#: address: 5 s where that does not answer (measured: for 103 connections of 6,000).
SLOW = 15.0

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = frozenset(("localhost", "127.0.0.1", "::1"))
_START = "spectrain_ext/start"  # of the ranks: its name, under this key of the store
_LOOK_AGAIN = 0.01  # seconds from one look to the next, whether rank 0 has answered or begun anew


def join_ranks(*, timeout: timedelta = timedelta(minutes=30)) -> tuple[int, int]:
    """Make the default process group, of gloo, of all ranks that a launcher has started.

    It reads the environment as ``init_process_group("gloo")`` does, and differs in this:

    - Ranks that ``torchrun`` has started again find one another and nobody else, although its store
      still has the addresses of those before. There may be fewer or more of them, and each
      machine's launcher may have started its own another number of times.
    - Where no ``torchrun`` keeps the store, rank 0 does, and listens on ``MASTER_ADDR`` alone.
    - Where all ranks are on one machine, gloo and NCCL stay on the loopback interface, unless
      ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` is set.

    Args:
        timeout: how long ranks wait for one another, here and in what they do by this group.

    Returns:
        This process's rank, and the number of ranks.

    Raises:
        RuntimeError: no launcher has set ``RANK`` and the like; or there is a process group.
        OSError: rank 0 cannot listen on ``MASTER_ADDR``; names address and port.
        TimeoutError: another rank has not come; rank 0 names it.
    """
    if dist.is_initialized():
        raise RuntimeError("join_ranks: there is a process group already")
    given = os.environ
    missing = [name for name in _VARIABLES if name not in given]
    if missing:
        raise RuntimeError(
            f"join_ranks: expected {', '.join(missing)} in the environment; start the script by "
            "torchrun, or set what it sets"
        )
    rank, ranks = int(given["RANK"]), int(given["WORLD_SIZE"])
    _stay_on_loopback(given, ranks)
    kept = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = given["MASTER_ADDR"], int(given["MASTER_PORT"])
    store = _launchers_store(address, port, listen=rank == 0 and not kept)
    store = PrefixStore(_met(store, rank, ranks, timeout), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    return rank, ranks


def _stay_on_loopback(environment: MutableMapping[str, str], ranks: int) -> None:
    """On one machine nothing needs to be heard outside of it; a user's own choice stands."""
    one_machine = environment.get("LOCAL_WORLD_SIZE") == str(ranks)
    if one_machine or environment["MASTER_ADDR"] in _LOCAL:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(name, "lo")


@cache  # one that keeps it joins again by what it has
def _launchers_store(address: str, port: int, *, listen: bool) -> Store:
    try:
        return store_at(address, port, listen=listen)
    except OSError as error:
        raise OSError(
            f"MASTER_ADDR and MASTER_PORT: {error}; they must be of rank 0's machine, on which "
            "it listens there and nowhere else"
        ) from error


def _met(store: Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """A name that these ranks have in common, and no earlier ones by the same store.

    TORCHELASTIC_RESTART_COUNT is none: it counts the failures that one machine's launcher has seen,
    and a machine that comes or goes is no failure (torch 2.13). So rank 0 draws a name and answers
    whoever finds it. Under an earlier one nobody answers.
    """
    name = uuid4().hex
    waited = f"within {timeout.total_seconds():.1f} s"
    if rank == 0:
        mine = PrefixStore(name, store)
        store.set(_START, name)
        for other in range(1, ranks):
            if not _came(mine, f"here/{other}", timeout):
                raise TimeoutError(f"join_ranks: rank {other} of {ranks} has not come {waited}")
            mine.set(f"answer/{mine.get(f'here/{other}').decode()}", "")
        return name
    until = monotonic() + timeout.total_seconds()
    found = ""
    while _came(store, _START, timeout) and monotonic() < until:
        before, found = found, store.get(_START).decode()
        theirs = PrefixStore(found, store)
        if found != before:
            theirs.set(f"here/{rank}", name)
        if theirs.check([f"answer/{name}"]):
            return found
        sleep(_LOOK_AGAIN)  # a wait of the store's own that is in vain is a warning of torch's
    raise TimeoutError(f"join_ranks: rank {rank} has had no answer of rank 0 {waited}")


def _came(store: Store, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except DistStoreError:
        return False
    return True


def store_at(
    address: str, port: int, *, listen: bool, timeout: timedelta = timedelta(minutes=30)
) -> Store:
    """Make or join the store of a process group, which listens on one address only.

    ``init_process_group`` by itself makes one that listens on all interfaces, whatever address it
    was given.

    Args:
        address: an IP address or a name, of the machine that keeps the store.
        port: its port; 0: any that is free, ``store.port`` then is it.
        listen: whether this process keeps the store: one does, usually rank 0.
        timeout: how long a call waits for another process, of this one that joins as well.

    Raises:
        OSError: this process cannot listen there; names address and port.
    """
    given: dict[str, Any] = {"host_name": address, "timeout": timeout, "wait_for_workers": False}
    if listen:
        listening = _listening(address, port)
        port = listening.getsockname()[1]
        given["master_listen_fd"] = listening.detach()
    store: Store = TCPStore(port=port, is_master=listen, **given)
    return store


def _listening(address: str, port: int) -> socket.socket:
    failure: OSError | None = None
    try:
        for family, *_, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
            try:
                return socket.create_server(where, family=family, backlog=socket.SOMAXCONN)
            except OSError as error:
                failure = error
    except socket.gaierror as error:
        failure = error
    reason = None if failure is None else failure.strerror
    raise OSError(f"cannot listen on {address}, port {port}: {reason}") from failure


def connection(store: Store, patience: float, timeout: float) -> Store:
    """Another connection to the same store, whose calls wait ``patience`` seconds for a key."""
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=max(timeout / 2, SLOW)))  # torch tries twice
    try:
        made: Store = store.clone()  # type: ignore[attr-defined]
    finally:
        store.set_timeout(before)
    made.set_timeout(timedelta(seconds=patience))
    return made
