"""Flat: one buffer per dtype that a stage's parameters are views of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes: vector loads, and what matrix libraries ask of their operands


class Flat:
    """One buffer per dtype, and in it one view per parameter, with its shape and strides.

    Args:
        params: the parameters that the layout is made for.
        dtype_of: the dtype of each parameter's view; its own where not given.
    """

    def __init__(
        self, params: Sequence[Tensor], dtype_of: Callable[[Tensor], torch.dtype] | None = None
    ) -> None:
        dtypes = [p.dtype if dtype_of is None else dtype_of(p) for p in params]
        offsets, sizes = _layout(params, dtypes)
        buffers = {dtype: _aligned(size, dtype, params[0].device) for dtype, size in sizes.items()}
        self.buffers = list(buffers.values())
        self.views: dict[Tensor, Tensor] = {}
        for p, dtype, offset in zip(params, dtypes, offsets, strict=True):
            buffer = buffers[dtype]
            # empty_like keeps the strides of every dense layout and closes the gaps of any other.
            strides = torch.empty_like(p, device="meta").stride()
            self.views[p] = buffer.as_strided(p.shape, strides, buffer.storage_offset() + offset)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, gaps between parameters included."""
        return sum(buffer.nbytes for buffer in self.buffers)


def flat_nbytes(params: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> int:
    """The bytes that a ``Flat`` of these dtypes would have."""
    return sum(size * dtype.itemsize for dtype, size in _layout(params, dtypes)[1].items())


def _layout(
    params: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[list[int], dict[torch.dtype, int]]:
    """Every parameter's first element in the buffer of its dtype, and the buffers' sizes."""
    offsets: list[int] = []
    sizes: dict[torch.dtype, int] = {}
    for p, dtype in zip(params, dtypes, strict=True):
        offset = sizes.get(dtype, 0)
        offsets.append(offset)
        step = ALIGNMENT // dtype.itemsize
        sizes[dtype] = offset + -(-p.numel() // step) * step
    return offsets, sizes


def _aligned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    spare = ALIGNMENT // dtype.itemsize
    buffer = torch.zeros(size + spare, dtype=dtype, device=device)
    shift = -buffer.data_ptr() % ALIGNMENT // dtype.itemsize
    return buffer[shift : shift + size]
