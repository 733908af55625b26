"""Looks at a module's tensors, and runs a module without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn


def is_valueless(*modules: nn.Module) -> bool:
    """Whether any parameter is on the meta device."""
    return any(p.is_meta for module in modules for p in module.parameters())


def slots_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Yield a module's parameters and buffers: owner, attribute, full name, tensor."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in chain(owner._parameters.items(), owner._buffers.items()):
            if tensor is not None:
                yield owner, key, f"{path}.{key}" if path else key, tensor


def set_mode(model: nn.Module, mode: bool) -> None:
    """Set the mode without the modules' own train() and eval(), which may change weights."""
    for module in model.modules():
        module.training = mode


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def untouched(block: nn.Module) -> Iterator[None]:
    """Restore gradients and module buffers afterwards, including buffers that were reassigned."""
    gradients = [(p, p.grad) for p in block.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    owned = [(part._buffers, dict(part._buffers)) for part in block.modules()]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        for held, before_in in owned:
            held.clear()
            held.update(before_in)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
