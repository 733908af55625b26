"""A pass that moves what autograd saves to CPU memory, and back to the device for its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.views import ProcessesView, RunView, StageView
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import Message
from spectrain_ext.weights.storage import unchanged, unpacked

_MIN_BYTES = 1024  # copying less is not worth it


class OffloadActivations(Pass):
    """Keeps what autograd saves between a forward and its backward in CPU memory; no bit changes.

    Parameters, module buffers, tensors in a receive buffer, which stay there anyway, and small
    tensors are not copied. Storages are copied as a whole, each once. A backward gets the strides
    of its forward, so that it calls the same kernels. On CUDA copies go to the stream that
    computes: it orders them with their uses, and the CPU waits for nothing. On a CPU this only
    costs time.

    Raises:
        ValueError: with ``recompute=True``, which saves nothing to move, or tensor parallelism.

    Example:
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.1)
        >>> passes = [st.passes.OffloadActivations()]
        >>> pipe = st.Pipeline([nn.Linear(2, 1)], sgd, nn.functional.mse_loss, passes=passes)
        >>> pipe.release()
    """

    def on(self, stage: StageView, processes: ProcessesView) -> Self:
        if stage.recomputes:
            raise ValueError(
                "OffloadActivations: with recompute=True, which keeps no activations, there are "
                "none to move; give one of the two, or checkpoint blocks in the stages"
            )
        if processes.sharded:
            raise ValueError(
                "OffloadActivations: it does not move the shards that tensor-parallel stages save; "
                "give recompute=True, or checkpoint blocks in the stages"
            )
        return super().on(stage, processes)

    def begin(self, run: RunView) -> Mapping[Kind, Handler]:
        self._left: set[int] = set()  # addresses of storages that are not copied
        # As long as the weak references exist, no other storage has the address of one of these.
        self._copies: dict[tuple[int, int], tuple[Tensor, StorageWeakRef]] = {}
        return {}

    def saving(self, inner: AbstractContextManager[object]) -> AbstractContextManager[object]:
        return Saving(self._pack, self._copies.clear, inner)

    def calls(self, i: int, j: int, function: object, inputs: Message) -> None:
        module = self.stage.module
        there = (*module.parameters(), *module.buffers(), *inputs.tensors)
        self._left = {
            tensor.untyped_storage().data_ptr()
            for tensor in there
            if tensor is not None and tensor.layout is torch.strided
        }

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        device = self.stage.device
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.device != device
            or tensor.nbytes < _MIN_BYTES
            or tensor.is_conj()
            or tensor.is_neg()
            or (storage := tensor.untyped_storage()).data_ptr() in self._left
        ):
            return partial(unchanged, tensor.detach(), tensor._version)
        copied = self._copies.get((storage._cdata, tensor._version))
        if copied is None:
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copied = on_host(held), StorageWeakRef(storage)
            self._copies[storage._cdata, tensor._version] = copied
        size, stride = tuple(tensor.shape), tensor.stride()
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        first = int(tensor.storage_offset()) * tensor.itemsize
        part = copied[0][first : first + span * tensor.itemsize]
        return partial(_on_device, part, device, tensor.dtype, size, stride)


class Saving:
    """Has autograd save what ``pack`` returns, unless hooks of ``inner`` come first."""

    def __init__(
        self,
        pack: Callable[[Tensor], Callable[[], Tensor]],
        forget: Callable[[], None],
        inner: AbstractContextManager[object],
    ) -> None:
        self._pack, self._forget, self._inner = pack, forget, inner
        self._hooks: saved_tensors_hooks | None = None  # inside; if kept, these would form a cycle

    def __enter__(self) -> None:
        self._hooks = saved_tensors_hooks(self._pack, unpacked)
        self._hooks.__enter__()
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        assert self._hooks is not None
        self._inner.__exit__(*raised)
        self._hooks.__exit__(*raised)
        self._hooks = None
        self._forget()


def on_host(tensor: Tensor) -> Tensor:
    """Copy to CPU memory, pinned if the tensor is on CUDA, on the tensor's current stream."""
    pins = tensor.is_cuda
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
    return host.copy_(tensor, non_blocking=True)


def _on_device(
    part: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    flat = part.to(device, non_blocking=True).view(dtype)
    return flat.as_strided(size, stride, int(flat.storage_offset()))
