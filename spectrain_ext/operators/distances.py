"""Distances between versions of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

from .library import traceable
from .lists import Lists, Role, Tensors, current, is_array

_CUDA = 2  # kDLCUDA of DLPack


@overload
def distance(
    params: Tensor | Sequence[Tensor], others: Sequence[Tensors], *, stream: Any = ...
) -> tuple[Tensor, Tensor]: ...


@overload
def distance(
    params: Tensors, others: Sequence[Tensors], *, stream: Any = ...
) -> tuple[Any, Any]: ...


def distance(params: Tensors, others: Sequence[Tensors], *, stream: Any = None) -> tuple[Any, Any]:
    """How far other versions of the weights are from them, in one pass and without a copy.

    With a prediction made s updates ago and the stale weights of that time as `others`, these are
    the errors that the SpecTrain paper draws (as root mean squares: divide by the root of the
    number of elements).

    Args:
        params: the weights now; n tensors, or arrays of other frameworks.
        others: k lists like the parameters.
        stream: CUDA stream; None: the current one.

    Returns:
        Two float64 tensors on the parameters' device, or NumPy arrays where the first of params is
        one: the Euclidean norm of others[j][i] - params[i], of shape (k, n), and that of the whole
        lists, of shape (k,). The sums are made in an order that depends on the shapes only: the
        same bits on the CPU and on every GPU.
    """
    norms: Any = _distance(params, others, stream=stream)
    first = params if is_array(params) else next(iter(cast("Sequence[object]", params)), None)
    if first is not None and _is_numpys(first):
        norms = norms.numpy()
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
    native = lists.plan()
    # Outputs may be narrower than their parameters, versions may not.
    for j, arrays in enumerate(given):
        for i, (array, version) in enumerate(zip(lists.params, arrays, strict=True)):
            wanted, came = _dtype(array), _dtype(version)
            if str(came).rpartition(".")[2] != str(wanted).rpartition(".")[2]:
                raise ValueError(f"others[{j}][{i}]: expected {wanted}, got {came}")
    arrays = lists.params
    device = _device(arrays[0]) if arrays else None
    with current(stream, device):
        squares = torch.zeros(len(others), len(arrays) + 1, dtype=torch.float64, device=device)
        scratch = torch.empty(native.distance_scratch(), dtype=torch.uint8, device=device)
        native.distances(squares.data_ptr(), scratch.data_ptr(), stream)
        return squares.sqrt_()


def _is_numpys(array: object) -> bool:
    return any(base.__module__.partition(".")[0] == "numpy" for base in type(array).__mro__)


def _dtype(array: Any) -> object:
    """Its dtype in its framework's words; that of a buffer, which has none, in torch's."""
    if hasattr(array, "dtype"):
        return array.dtype
    return {"e": torch.float16, "f": torch.float32, "d": torch.float64}[memoryview(array).format]


def _device(array: Any) -> torch.device:
    if isinstance(array, Tensor):
        return array.device
    if not hasattr(array, "__dlpack_device__"):
        cuda = hasattr(array, "__cuda_array_interface__")  # of the device that is current
        return torch.device("cuda" if cuda else "cpu")
    kind, index = array.__dlpack_device__()
    return torch.device("cuda", index) if kind == _CUDA else torch.device("cpu")
