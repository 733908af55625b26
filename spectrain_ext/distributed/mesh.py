"""Lays a pipeline out on a group or mesh of ranks: who has which stage, replica and shard."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spectrain_ext.schedule import Replicas

#: Names of the dimensions of stages, and of ranks that share one by tensor parallelism.
STAGES, SHARDS = "pp", "tp"
Group = dist.ProcessGroup | DeviceMesh | None


class RankLayout(NamedTuple):
    """The ranks of a pipeline's stages, and this rank's place and shards."""

    replicas: Replicas
    where: str = ""  # this rank's place in a mesh, for reports
    shards: DeviceMesh | None = None  # of the ranks that share this one's replica; None: it has all


def members_of(group: Group) -> tuple[int, ...]:
    """Return a group's ranks in the default group, ascending; ValueError without this one."""
    members, here = sorted(_listed(group)), dist.get_rank()
    if here not in members:
        raise ValueError(f"group: this process is rank {here}, and not one of its {members}")
    return tuple(members)


def _listed(group: Group) -> list[int]:
    ranks: list[int]
    if isinstance(group, DeviceMesh):
        ranks = group.mesh.flatten().tolist()
    else:
        ranks = dist.get_process_group_ranks(group)
    return ranks


def layout_of(group: Group, stages: int, replicas: int | Sequence[int] | None) -> RankLayout:
    """Return the layout of a pipeline with so many stages on each rank.

    On a mesh, stages follow the dimension ``pp``, and the shards of a stage ``tp``, if there is
    one; all other dimensions have its replicas.

    Raises:
        ValueError: ranks, stages and replicas do not fit, or the mesh has no ``pp``, or rank 0 of
            the pipeline would not have the first stage.
    """
    listed, where, shards = _listed(group), "", None
    if isinstance(group, DeviceMesh):
        names, sizes = list(group.mesh_dim_names or ()), group.mesh.shape
        if STAGES not in names:
            raise ValueError(
                f"group: expected a mesh with a dimension {STAGES!r}, which has the stages, got "
                f"{names or 'one without names'}"
            )
        others = [n for n, name in enumerate(names) if name not in (STAGES, SHARDS)]
        order = [names.index(name) for name in (STAGES, SHARDS) if name in names]
        order[1:1] = others
        count = prod(sizes[n] for n in others)
        if replicas not in (None, count):
            raise ValueError(f"replicas: the mesh has {count} of every stage, got {replicas}")
        found = _replicas_of(stages, count, sizes[order[0]] * count)
        listed = group.mesh.permute(order).flatten().tolist()
        at = zip(names, group.get_coordinate() or (), strict=True)
        where = ", ".join(f"{name} {place}" for name, place in at)
        shards = group[SHARDS] if SHARDS in names else None
    else:
        found = _replicas_of(stages, replicas, len(listed))
    members, each = sorted(listed), len(listed) // found.ranks
    if listed[0] != members[0]:
        raise ValueError(
            f"group: rank {listed[0]} is the first, and takes the batches; it must be the lowest, "
            f"which is {members[0]}"
        )
    places = [members.index(rank) for rank in listed]
    rows = [places[n * each : (n + 1) * each] for (n,) in found.rows]
    return RankLayout(Replicas(found.counts, rows=rows), where, shards)


def _replicas_of(stages: int, replicas: int | Sequence[int] | None, ranks: int) -> Replicas:
    """Assign ranks to stages; ``stages`` is the number on each rank."""
    if stages < 2:
        return Replicas.of(replicas, ranks)
    if ranks == 1:
        raise ValueError(
            f"stage: got {stages} for the only rank; Pipeline takes all in one process"
        )
    if replicas not in (None, 1):
        raise ValueError(
            f"replicas: with {stages} stages on every rank expected one of each, got {replicas}"
        )
    return Replicas((1,) * (stages * ranks), ranks)
