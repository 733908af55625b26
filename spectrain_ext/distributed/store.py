"""Store: what a process group is made with, and further connections to it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

#: Seconds that new connections to a store may take. Torch asks a name server for the name of each
#: address: 5 s where that does not answer (measured: for 103 connections of 6,000).
SLOW = 15.0


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
