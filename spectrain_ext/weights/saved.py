"""Saved: what autograd saves of a stage's weights in a forward, found again in another version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .storage import Storage


class _Place(NamedTuple):
    """Where a saved tensor is in the flat buffer of its dtype, whichever version that holds."""

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Other(NamedTuple):
    """A saved tensor that is no weight, and its version then."""

    tensor: Tensor
    version: int


class _Outer(NamedTuple):
    """What the hooks of an outer context have packed, and what unpacks it."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class SavedWeights:
    """Inside, autograd saves of a weight only where it is; a backward finds the bound version's.

    A forward and its backward then compute with different versions, each in a buffer of its own, as
    if one buffer had been overwritten in between. The same bits come out (measured for
    convolutions, norms, Linear, eager and compiled). What is no weight goes through the hooks of an
    outer context, if there is one. Those of an inner one, as ``torch.utils.checkpoint`` and
    ``save_on_cpu`` have them, take the place of these.

    Args:
        storage: of the weights.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._places = storage, storage.addresses
        self._hooks: saved_tensors_hooks | None = None  # inside; kept, these would be a cycle
        self._outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None

    def __enter__(self) -> None:
        # Private in torch, 2.10 to 2.15: nothing else tells of an outer context.
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def __exit__(self, *raised: object) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*raised)
        self._hooks = None

    def _pack(self, tensor: Tensor) -> _Place | _Other | _Outer:
        try:
            found = self._places.get(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):  # a sparse tensor has none
            found = None
        if found is not None:
            buffer, first = found
            offset = int(tensor.storage_offset()) - first
            return _Place(buffer, tuple(tensor.size()), tensor.stride(), offset)
        if self._outer is not None:
            pack, unpack = self._outer
            return _Outer(pack(tensor), unpack)
        # Not the tensor itself: what a node saves of its own output would keep the node.
        return _Other(tensor.detach(), tensor._version)

    def _unpack(self, packed: _Place | _Other | _Outer) -> Tensor:
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        if isinstance(packed, _Other):
            tensor, version = packed
            if tensor._version != version:  # with hooks autograd does not look
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is "
                    f"at version {tensor._version}; expected version {version} instead"
                )
            return tensor
        number, size, stride, offset = packed
        buffer = self._storage.bound.flat.buffers[number]
        return buffer.as_strided(size, stride, int(buffer.storage_offset()) + offset)
