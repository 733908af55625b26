"""Lays a pipeline out on a device mesh: which ranks have which stage, replica and shard."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from spectrain_ext.schedule import Replicas

#: Names of the dimensions of stages, and of ranks that share one by tensor parallelism.
STAGES, SHARDS = "pp", "tp"


class Layout(NamedTuple):
    """Where the stages of a pipeline are."""

    replicas: Replicas
    where: str = ""  # this rank's place in a mesh, for reports
    shards: DeviceMesh | None = None  # of the ranks that share this one's replica; None: it has all


def layout_on(mesh: DeviceMesh, stages: int, replicas: object) -> Layout:
    """Return the layout of a pipeline with so many stages on each rank.

    Stages follow the dimension ``pp``, and the shards of a stage ``tp``, if there is one; all other
    dimensions have its replicas.

    Raises:
        ValueError: the mesh has no ``pp``, other replicas are asked for, or rank 0 of the pipeline
            would not have the first stage.
    """
    names = list(mesh.mesh_dim_names or ())
    if STAGES not in names:
        raise ValueError(
            f"group: expected a mesh with a dimension {STAGES!r}, which has the stages, got "
            f"{names or 'one without names'}"
        )
    others = [name for name in names if name not in (STAGES, SHARDS)]
    order = [STAGES, *others, *(name for name in names if name == SHARDS)]
    grid = mesh.mesh.permute([names.index(name) for name in order])
    count = prod(mesh.mesh.shape[names.index(name)] for name in others)
    if replicas not in (None, count):
        raise ValueError(f"replicas: the mesh has {count} of every stage, got {replicas}")
    if stages > 1 and count > 1:
        raise ValueError(
            f"replicas: with {stages} stages on every rank expected one of each, and the mesh has "
            f"{count}"
        )
    columns = grid.reshape(grid.shape[0] * count, -1).tolist()
    members = sorted(rank for column in columns for rank in column)
    rows = [[members.index(rank) for rank in column] for column in columns] * stages
    if rows[0][0]:
        raise ValueError(
            f"group: rank {columns[0][0]} is the first of dimension {STAGES!r} and takes the "
            f"batches; it must be the lowest of the mesh, which is {members[0]}"
        )
    at = zip(names, mesh.get_coordinate() or (), strict=True)
    return Layout(
        Replicas((count,) * (grid.shape[0] * stages), rows=rows),
        ", ".join(f"{name} {place}" for name, place in at),
        mesh[SHARDS] if SHARDS in names else None,
    )
