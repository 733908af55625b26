"""Distances between versions of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .library import traceable
from .lists import Lists, Role, Tensors, current


def distance(
    params: Tensors, others: Sequence[Tensors], *, stream: Any = None
) -> tuple[Tensor, Tensor]:
    """How far other versions of the weights are from them, in one pass and without a copy.

    With a prediction made s updates ago and the stale weights of that time as `others`, these are
    the errors that the SpecTrain paper draws (as root mean squares: divide by the root of the
    number of elements).

    Args:
        params: the weights now; n torch tensors.
        others: k lists like the parameters.
        stream: CUDA stream; None: the current one.

    Returns:
        Two float64 tensors on the parameters' device: the Euclidean norm of others[j][i] -
        params[i], of shape (k, n), and that of the whole lists, of shape (k,). The sums are made in
        an order that depends on the shapes only: the same bits on the CPU and on every GPU.
    """
    norms = _distance(params, others, stream=stream)
    return norms[:, :-1], norms[:, -1]


@traceable
def _distance(params: Tensors, others: Sequence[Tensors], *, stream: Any = None) -> Tensor:
    """The two in one tensor, which a graph can hold: of shape (k, n + 1)."""
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
