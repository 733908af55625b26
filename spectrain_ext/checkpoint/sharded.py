"""Makes DTensors for saving, and pieces of whole tensors; of a plain tensor all is one piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain_ext.weights.storage import local_part


def part_like(part: Tensor, p: Any) -> Tensor:
    """Return a tensor like a parameter, of which ``part`` is what this process has."""
    if local_part(p) is p:
        return part
    from torch.distributed.tensor import DTensor

    look = {"shape": p.shape, "stride": p.stride()}
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, **look)


def piece_of(tensor: Tensor, p: Any) -> Tensor:
    """Return what this process has of a whole tensor that is cut as the parameter is."""
    dim = getattr(p.placements[0], "dim", None) if local_part(p) is not p else None
    if dim is None:
        return tensor
    # A DTensor has torch.chunk's pieces, and empty ones after the last.
    pieces, rank = tensor.chunk(p.device_mesh.size(), dim), p.device_mesh.get_local_rank()
    piece = pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)
    return piece.clone(memory_format=torch.preserve_format)
