"""Neighbours: the links and groups of one rank, which all ranks make in one order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..schedule import Replicas
from .link import Link


class Circle(NamedTuple):
    """The replicas of one stage, as they add up what each of them has.

    Attributes:
        ranks: of the replicas, within the pipeline.
        host: a gloo group of them.
        device: the group that gradients go by: the same, or one of NCCL.
    """

    ranks: tuple[int, ...]
    host: dist.ProcessGroup
    device: dist.ProcessGroup


class Neighbours(NamedTuple):
    """The links of one rank by the rank at their other end; empty where there is no neighbour.

    Attributes:
        from_previous, to_previous: those to the stage before.
        from_next, to_next: those to the stage after.
        from_first: on the replicas of stage 0, what its first replica says of batches.
        to_replicas: the same on that one.
        targets_from: on the ranks of the last stage, where targets come from; empty if from the
            caller.
        targets_to: the same on those of the first stage.
        circle: the replicas of this rank's stage; None if it has one.
    """

    from_previous: dict[int, Link]
    to_previous: dict[int, Link]
    from_next: dict[int, Link]
    to_next: dict[int, Link]
    from_first: dict[int, Link]
    to_replicas: dict[int, Link]
    targets_from: dict[int, Link]
    targets_to: dict[int, Link]
    circle: Circle | None = None


def open_links(
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: float,
    dynamic: bool,
    replicas: Replicas | None = None,
    targets: bool = False,
) -> Neighbours:
    """Make the groups of all directed edges that end or begin at this rank, and use each once.

    One group per directed edge: the two directions would otherwise wait for each other. All ranks
    make all groups, in one order, as torch asks of them.

    Args:
        group: the ranks of the pipeline, stage by stage; None: the default group.
        device: of this rank's stage; on CUDA bodies go by NCCL.
        timeout: seconds that a rank may take to come here.
        dynamic: whether later messages may be larger than the first.
        replicas: of every stage; None: one each.
        targets: whether the first stage sends them to the last.

    Raises:
        ValueError: the group has not all ranks of the default group.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"group: expected all {dist.get_world_size()} ranks of the default group, got "
            f"{len(ranks)}"
        )
    me = dist.get_rank(group)
    seats = Replicas((1,) * len(ranks)) if replicas is None else replicas
    found = Neighbours({}, {}, {}, {}, {}, {}, {}, {})

    def link(
        sender: int, receiver: int, out: dict[int, Link], into: dict[int, Link], of: str = ""
    ) -> None:
        pair = [ranks[sender], ranks[receiver]]
        mine = me in (sender, receiver)
        host, by_device = _groups(pair, mine, device, timeout)
        if host is None or by_device is None:
            return
        other = receiver if sender == me else sender
        name = f"edge {sender} -> {receiver}{of}"
        made = Link(name, sender, receiver, ranks[other], host, by_device, dynamic)
        (out if sender == me else into)[other] = made

    for a, b in seats.edges():
        link(a, b, found.to_next, found.from_previous)
        link(b, a, found.to_previous, found.from_next)
    first, *others = seats.ranks_of(0)
    for other in others:
        link(first, other, found.to_replicas, found.from_first)
    if targets and seats.stages > 1:
        for a, b in seats.pairs(0, seats.stages - 1):
            link(a, b, found.targets_to, found.targets_from, " of targets")
    circle = None
    for k in range(seats.stages):
        members = seats.ranks_of(k)
        if len(members) > 1:
            host, by_device = _groups([ranks[r] for r in members], me in members, device, timeout)
            if host is not None and by_device is not None:
                circle = Circle(tuple(members), host, by_device)
    return found._replace(circle=circle)


def open_host_group(group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup:
    """A gloo group of all ranks, for what their hosts tell one another."""
    ranks = dist.get_process_group_ranks(group)
    made = _group(ranks, True, "gloo", torch.device("cpu"), timeout)
    assert made is not None
    return made


def _groups(
    ranks: Sequence[int], mine: bool, device: torch.device, timeout: float
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group for the hosts, and that for the device: the same on the CPU."""
    host = by_device = _group(ranks, mine, "gloo", torch.device("cpu"), timeout)
    if device.type == "cuda":
        by_device = _group(ranks, mine, "nccl", device, timeout)
    return host, by_device


def _group(
    ranks: Sequence[int], mine: bool, backend: str, device: torch.device, timeout: float
) -> dist.ProcessGroup | None:
    # gloo's own deadline would break the connection: the board's comes first.
    longer = timedelta(seconds=max(4 * timeout, 60.0))
    made = dist.new_group(list(ranks), timeout=longer, backend=backend)
    if not mine:
        return None
    assert isinstance(made, dist.ProcessGroup)
    # The first use connects; it must not be a message whose deadline is short.
    dist.all_reduce(torch.zeros(1, device=device), group=made)
    return made
