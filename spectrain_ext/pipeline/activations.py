"""Recomputes blocks in the backward, and moves what autograd saves to CPU memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from spectrain_ext.transport.message import tensors_in
from spectrain_ext.weights.storage import unchanged, unpacked

from .names import full_names
from .tape import ModuleBuffers

#: What is computed again in a backward: nothing, the whole stage, every k-th block, or what a
#: function of a module's name and the module selects.
Recompute = bool | int | Callable[[str, nn.Module], bool]

#: What waits in CPU memory: what autograd saves.
Offload = Literal["activations"] | None


def _called_in(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's children; for lists and dicts of modules, which are not called, theirs."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # which is not called itself
            yield from _called_in(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def recomputed_blocks(
    stages: Mapping[int, nn.Module], recompute: Recompute
) -> dict[int, dict[str, nn.Module]]:
    """Return, by stage, the blocks whose forward runs again in the backward."""
    found = {k: _blocks_at(k, stage, recompute) for k, stage in stages.items()}
    if not any(found.values()):
        warnings.warn(
            f"recompute: it picks no block of stages {', '.join(map(str, stages))}", stacklevel=3
        )
    return found


def _blocks_at(k: int, stage: nn.Module, recompute: Recompute) -> dict[str, nn.Module]:
    names = getattr(stage, "block_names", None)
    if names is None:
        blocks = dict(_called_in(stage, ""))
    else:
        blocks = {name: stage.get_submodule(name) for name in names}
    if not blocks and names is not None:
        raise ValueError(
            f"recompute: stages[{k}] is one traced graph, without blocks; give recompute=True, or "
            "cut the model with split_points that name more places than there are cuts"
        )
    if isinstance(recompute, int):
        found = dict(list(blocks.items())[recompute - 1 :: recompute])
    else:
        found = dict(_picked(stage, blocks, recompute))
    for name in found:
        atoms = name.split(".")
        for count in range(len(atoms)):
            around = stage.get_submodule(".".join(atoms[:count]))
            if around._compiled_call_impl is not None or "_orig_mod" in around._modules:
                raise ValueError(
                    f"recompute: stages[{k}]: block {name!r} is inside of a compiled module; "
                    "compile the blocks one by one, or give recompute=True"
                )
    return found


def _picked(
    stage: nn.Module, modules: Mapping[str, nn.Module], pick: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a function selects by the model's names; go into those it does not."""
    for name, module in modules.items():
        (full,) = full_names(stage, [f"{name}."], "").values()
        if pick(full.rstrip(".") or name, module):
            yield name, module
        elif getattr(module, "block_names", None) is None:
            inner = {f"{name}.{inner}": m for inner, m in _called_in(module, "")}
            yield from _picked(stage, inner, pick)


class RecomputedBlocks:
    """Blocks that the backward computes again, with the module buffers of the first forward.

    Their calls are replaced during a run; no module is wrapped or renamed.
    """

    def __init__(self, stage: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        # Hooks of a block are part of its call, as they may make its weights. In a stage that
        # defines ``block_names`` they may be the stage's own, and must stay outside.
        named = getattr(stage, "block_names", ())
        self._blocks = [
            (module, name, "forward" if name in named else "_compiled_call_impl")
            for module, name in {module: name for name, module in blocks.items()}.items()
        ]
        self._replaced: list[tuple[nn.Module, str, dict[str, Any]]] = []

    def begin(self) -> None:
        for module, name, attribute in self._blocks:
            held = vars(module)
            before = {attribute: held[attribute]} if attribute in held else {}
            call = getattr(module, attribute) or module._call_impl
            self._replaced.append((module, attribute, before))
            held[attribute] = partial(_recomputed, name, module, call)

    def end(self) -> None:
        """Restore the blocks' calls; may be repeated, or called without a begin."""
        while self._replaced:
            module, attribute, before = self._replaced[-1]
            vars(module).pop(attribute, None)
            vars(module).update(before)
            self._replaced.pop()


def _recomputed(
    name: str, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a block so that autograd saves nothing of it but its arguments."""
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    leaves, form = tree_flatten((args, kwargs))
    first = [(args, kwargs)]

    def run(*leaves: Any) -> Any:
        # The second call gets lists and dicts as they were before the first.
        given, named = first.pop() if first else tree_unflatten(leaves, form)
        return call(*given, **named)

    found = ModuleBuffers(module)
    tensors = list(tensors_in(leaves))
    versions = [tensor._version for tensor in tensors]
    output = checkpoint(
        run, *leaves, use_reentrant=False, context_fn=lambda: (nullcontext(), found)
    )
    if versions != [tensor._version for tensor in tensors]:
        raise RuntimeError(
            f"recompute: block {name!r} works in place on what it is given, and would find it "
            "changed the second time; pick a block around it, or give recompute=True"
        )
    return output


# CPU memory.

_MIN_BYTES = 1024  # bytes; copying less is not worth it


class OnHost:
    """Inside, what autograd saves is copied to CPU memory, and back to the device for its backward.

    Parameters, module buffers, tensors in a receive buffer (``lent``), which stay there anyway, and
    small tensors are not copied. Storages are copied as a whole, each once. A backward gets the
    strides of its forward, so that it calls the same kernels. On CUDA copies go to the stream that
    computes: it orders them with their uses, and the CPU waits for nothing.
    """

    lent: Sequence[Tensor | None] = ()

    def __init__(
        self, module: nn.Module, device: torch.device, inner: AbstractContextManager[object]
    ) -> None:
        self._module, self._device = module, device
        self._inner = inner  # its hooks come first: saved weights
        self._hooks: saved_tensors_hooks | None = None  # inside; if kept, these would form a cycle
        # As long as the weak references exist, no other storage has the address of one of these.
        self._copies: dict[tuple[int, int], tuple[Tensor, StorageWeakRef]] = {}

    def __enter__(self) -> None:
        module = self._module
        there = (*module.parameters(), *module.buffers(), *self.lent)
        self._left = {
            tensor.untyped_storage().data_ptr()
            for tensor in there
            if tensor is not None and tensor.layout is torch.strided
        }
        self._hooks = saved_tensors_hooks(self._pack, unpacked)
        self._hooks.__enter__()
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        assert self._hooks is not None
        self._inner.__exit__(*raised)
        self._hooks.__exit__(*raised)
        self._hooks = None
        self._copies.clear()
        self.lent = ()

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.device != self._device
            or tensor.nbytes < _MIN_BYTES
            or tensor.is_conj()
            or tensor.is_neg()
            or (storage := tensor.untyped_storage()).data_ptr() in self._left
        ):
            return partial(unchanged, tensor.detach(), tensor._version)
        found = self._copies.get((storage._cdata, tensor._version))
        if found is None:
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found = on_host(held), StorageWeakRef(storage)
            self._copies[storage._cdata, tensor._version] = found
        size, stride = tuple(tensor.shape), tensor.stride()
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        first = int(tensor.storage_offset()) * tensor.itemsize
        part = found[0][first : first + span * tensor.itemsize]
        return partial(_on_device, part, self._device, tensor.dtype, size, stride)


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
