"""Neighbours: the links of one rank, over groups of two that all ranks make in one order."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from .link import Link


class Neighbours(NamedTuple):
    """The links of one rank; None where there is no neighbour."""

    from_previous: Link | None
    to_previous: Link | None
    from_next: Link | None
    to_next: Link | None


def open_links(
    group: dist.ProcessGroup | None, device: torch.device, timeout: float, dynamic: bool
) -> Neighbours:
    """Make the groups of all directed edges that end or begin at this rank, and use each once.

    One group per directed edge: the two directions would otherwise wait for each other. All ranks
    make all groups, in one order, as torch asks of them.

    Args:
        group: the ranks of the pipeline, stage by stage; None: the default group.
        device: of this rank's stage; on CUDA bodies go by NCCL.
        timeout: seconds that a rank may take to come here.
        dynamic: whether later messages may be larger than the first.

    Raises:
        ValueError: the group has not all ranks of the default group.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"group: expected all {dist.get_world_size()} ranks of the default group, one per "
            f"stage, got {len(ranks)}"
        )
    me = dist.get_rank(group)
    links: dict[tuple[int, int], Link] = {}
    for k in range(len(ranks) - 1):
        for sender, receiver in ((k, k + 1), (k + 1, k)):
            pair = [ranks[sender], ranks[receiver]]
            mine = me in (sender, receiver)
            host = _group(pair, mine, "gloo", torch.device("cpu"), timeout)
            by_device = host
            if device.type == "cuda":
                by_device = _group(pair, mine, "nccl", device, timeout)
            if mine:
                assert host is not None and by_device is not None
                peer = ranks[receiver if sender == me else sender]
                name = f"edge {sender} -> {receiver}"
                links[sender, receiver] = Link(
                    name, sender, receiver, peer, host, by_device, dynamic
                )
    return Neighbours(
        links.get((me - 1, me)),
        links.get((me, me - 1)),
        links.get((me + 1, me)),
        links.get((me, me + 1)),
    )


def open_host_group(group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup:
    """A gloo group of all ranks, for what their hosts tell one another."""
    ranks = dist.get_process_group_ranks(group)
    made = _group(ranks, True, "gloo", torch.device("cpu"), timeout)
    assert made is not None
    return made


def _group(
    ranks: list[int], mine: bool, backend: str, device: torch.device, timeout: float
) -> dist.ProcessGroup | None:
    # gloo's own deadline would break the connection: the board's comes first.
    longer = timedelta(seconds=max(4 * timeout, 60.0))
    made = dist.new_group(ranks, timeout=longer, backend=backend)
    if not mine:
        return None
    assert isinstance(made, dist.ProcessGroup)
    # The first use connects; it must not be a message whose deadline is short.
    dist.all_reduce(torch.zeros(1, device=device), group=made)
    return made
