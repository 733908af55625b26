"""Recomputes blocks in the backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from spectrain_ext.transport.message import tensors_in

from .names import full_names
from .tape import ModuleBuffers

#: What is computed again in a backward: nothing, the whole stage, every k-th block, or what a
#: function of a module's name and the module selects.
Recompute = bool | int | Callable[[str, nn.Module], bool]


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
