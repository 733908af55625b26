"""Distances between versions of the weights, in one tensor: `distance` and its form in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .lists import Lists, Role, Tensors, current


def distances(params: Tensors, others: Sequence[Tensors], stream: Any) -> Tensor:
    """Norms of others[j][i] - params[i], float64 of shape (k, n + 1); the last: of whole lists."""
    if isinstance(others, Tensor) or not isinstance(others, Sequence):
        raise TypeError(f"others: expected a sequence of lists, got {type(others).__name__}")
    lists = Lists(params, "params", writes=False)
    given = [
        lists.add(Role.OUT, f"others[{j}]", other, writes=False) for j, other in enumerate(others)
    ]
    for i, array in enumerate(lists.params):
        if not isinstance(array, Tensor):
            raise TypeError(f"params[{i}]: expected a torch tensor, got {type(array).__name__}")
    native = lists.plan()
    # Outputs may be narrower than their parameters, versions may not.
    for j, arrays in enumerate(given):
        for i, (array, version) in enumerate(zip(lists.params, arrays, strict=True)):
            wanted, came = cast(Any, array).dtype, getattr(version, "dtype", None)
            if came != wanted:
                raise ValueError(f"others[{j}][{i}]: expected {wanted}, got {came}")
    tensors = cast(tuple[Tensor, ...], lists.params)
    device = tensors[0].device if tensors else None
    with current(stream, device):
        squares = torch.zeros(len(others), len(tensors) + 1, dtype=torch.float64, device=device)
        scratch = torch.empty(native.distance_scratch(), dtype=torch.uint8, device=device)
        native.distances(squares.data_ptr(), scratch.data_ptr(), stream)
        return squares.sqrt_()
