"""Joins the ranks of a launcher into a process group with a store, and exchanges values in it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import cache
from ipaddress import ip_address
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from spectrain_ext.peers import Peers

from .failures import is_broken_connection

#: Seconds that a new connection to a store may take. Torch resolves the name of each address, which
#: takes 5 s if the name server does not answer (measured: 103 of 6,000 connections).
CONNECT_SECONDS = 15.0

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = frozenset(("localhost", "127.0.0.1", "::1"))
_START = "spectrain_ext/start"  # the store's key of the name of this start of the ranks
_KEPT = "store"  # the group's store's key of the address of a pipeline's own
_POLL_SECONDS = 0.01  # seconds between two checks for rank 0's answer or a newer start


def join_ranks(*, timeout: timedelta = timedelta(minutes=30)) -> tuple[int, int]:
    """Make the default process group (gloo) of all ranks that a launcher has started.

    Like ``torch.distributed.init_process_group("gloo")``, it reads ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT`` from the environment. The differences:

    - After ``torchrun`` restarts ranks, they find each other and ignore the addresses of earlier
      ranks in its store. Their number may change, and each machine's launcher may have restarted a
      different number of times.
    - Without ``torchrun``'s store, rank 0 hosts one, and listens on ``MASTER_ADDR`` only.
    - If all ranks are on one machine, gloo and NCCL use the loopback interface unless
      ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` is set.

    Args:
        timeout: how long a rank waits for others, here and in operations of the group.

    Returns:
        This process's rank, and the number of ranks.

    Raises:
        RuntimeError: an environment variable is missing, or a process group exists already.
        OSError: rank 0 cannot listen on ``MASTER_ADDR``; the message names address and port.
        TimeoutError: another rank did not arrive; on rank 0 the message names it.

    Example:
        >>> import os
        >>> os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
        >>> st.join_ranks()
        (0, 1)
        >>> torch.distributed.destroy_process_group()
    """
    if dist.is_initialized():
        raise RuntimeError("join_ranks: there is a process group already")
    variables = os.environ
    missing = [name for name in _VARIABLES if name not in variables]
    if missing:
        raise RuntimeError(
            f"join_ranks: expected {', '.join(missing)} in the environment; start the script by "
            "torchrun, or set what it sets"
        )
    rank, ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    if variables.get("LOCAL_WORLD_SIZE") == str(ranks) or address in _LOCAL:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            variables.setdefault(name, "lo")
    kept = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _launchers_store(address, port, listen=rank == 0 and not kept)
    store = PrefixStore(_agree_on_start(store, rank, ranks, timeout), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    return rank, ranks


@cache  # the process that hosts the store joins again through the same one
def _launchers_store(address: str, port: int, *, listen: bool) -> Store:
    try:
        return store_at(address, port, listen=listen)
    except OSError as error:
        raise OSError(
            f"MASTER_ADDR and MASTER_PORT: {error}; they must be of rank 0's machine, on which "
            "it listens there and nowhere else"
        ) from error


def _agree_on_start(store: Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """Return a name for this start of the ranks, which differs from earlier ones in the store.

    TORCHELASTIC_RESTART_COUNT does not work: it counts the failures that one machine's launcher has
    seen, and a machine that joins or leaves is not a failure (torch 2.13). So rank 0 draws a name
    and answers each rank that finds it; under an earlier name nobody answers.
    """
    name = uuid4().hex
    waited = f"within {timeout.total_seconds():.1f} s"
    if rank == 0:
        mine = PrefixStore(name, store)
        store.set(_START, name)
        for other in range(1, ranks):
            if not _key_appears(mine, f"here/{other}", timeout):
                raise TimeoutError(f"join_ranks: rank {other} of {ranks} has not come {waited}")
            mine.set(f"answer/{mine.get(f'here/{other}').decode(errors='replace')}", "")
        return name
    until = monotonic() + timeout.total_seconds()
    found = ""
    while _key_appears(store, _START, timeout) and monotonic() < until:
        before, found = found, store.get(_START).decode(errors="replace")
        theirs = PrefixStore(found, store)
        if found != before:
            theirs.set(f"here/{rank}", name)
        if theirs.check([f"answer/{name}"]):
            return found
        sleep(_POLL_SECONDS)  # torch logs a warning when a wait of the store times out
    raise TimeoutError(f"join_ranks: rank {rank} has had no answer of rank 0 {waited}")


def _key_appears(store: Store, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except DistStoreError:
        return False
    return True


def store_at(
    address: str, port: int, *, listen: bool, timeout: timedelta = timedelta(minutes=30)
) -> Store:
    """Join a store, or host one that listens on this address only; port 0 picks a free one.

    The store that ``init_process_group`` makes listens on all interfaces, whatever its address.
    """
    options: dict[str, Any] = {"host_name": address, "wait_for_workers": False}
    if listen:
        try:
            family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(where, family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            reason = f"cannot listen on {address}, port {port}: {error.strerror}"
            raise OSError(reason) from error
        port = listening.getsockname()[1]
        options["master_listen_fd"] = listening.detach()
    store: Store = TCPStore(port=port, is_master=listen, timeout=timeout, **options)
    return store


def own_store(
    store: Store, keeps: bool, until: float
) -> tuple[Store | None, tuple[str, int] | None]:
    """Let one rank keep a store for some others, which then need the group's no more.

    Returns the store, for the rank that keeps it, and its address and port; None if that rank
    cannot tell one. TimeoutError if it has not come until then, as ``monotonic`` counts.
    """
    made, where = None, None
    if keeps:
        with suppress(OSError):  # there is no way, or it cannot listen
            if (address := _address_towards(store)) is not None:
                made = store_at(address, 0, listen=True)
                where = address, made.port  # type: ignore[attr-defined]
        store.set(_KEPT, json.dumps(where))
    elif not _key_appears(store, _KEPT, timedelta(seconds=max(0.0, until - monotonic()))):
        raise TimeoutError
    else:
        where = json.loads(store.get(_KEPT))
    return made, where


def _address_towards(store: Store) -> str | None:
    """Return this machine's address on the way to a store; None if only this machine knows it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)
    with socket.socket(*found[0][:2]) as towards:
        towards.connect(found[0][4])  # sends nothing
        address: str = towards.getsockname()[0]
    # A name of this machine may lead to its loopback interface here, and elsewhere to another.
    hidden = ip_address(address).is_loopback and store.host not in _LOCAL
    return None if hidden else address


def connection(store: Store, patience: float, timeout: float) -> Store:
    """Open another connection to the store, whose calls wait ``patience`` seconds for a key."""
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=max(timeout / 2, CONNECT_SECONDS)))  # torch tries twice
    try:
        made: Store = store.clone()  # type: ignore[attr-defined]
    finally:
        store.set_timeout(before)
    made.set_timeout(timedelta(seconds=patience))
    return made


# Values


class GroupPeers(Peers):
    """The processes of a group, of which a pipeline's ranks watch one another meanwhile."""

    def __init__(
        self, group: dist.ProcessGroup, busy: Callable[[str], AbstractContextManager[object]]
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._busy = group, busy

    def all_gather(self, value: Any) -> list[Any]:
        # JSON, because torch's object collectives unpickle messages, which can execute code.
        text = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        try:
            dist.all_gather(sizes, torch.tensor([len(text)]), group=self._group)
            longest = max(int(size) for size in sizes)
            texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
            dist.all_gather(texts, padded, group=self._group)
        except RuntimeError as error:
            if is_broken_connection(error):
                raise ConnectionError(f"the processes have lost one another: {error}") from error
            raise
        return [json.loads(each.numpy().tobytes()) for each in texts]
