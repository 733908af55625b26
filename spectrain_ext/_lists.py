"""Arguments that are one array or a sequence of them, and the native plan they make."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from spectrain_ext import _C

Tensors: TypeAlias = Tensor | Sequence[Tensor]
Gradients: TypeAlias = Tensor | None | Sequence[Tensor | None]


class Role(IntEnum):
    """What a list is to the native plan (csrc/bindings/arrays.h)."""

    PARAMS = 0
    MOMENTUM = 1
    GRADS = 2
    STASHED = 3
    OUT = 4


NativeList: TypeAlias = tuple[int, str, bool, tuple[object, ...]]


def is_single(value: object) -> TypeGuard[Tensor]:
    """Whether an argument is one array rather than a sequence of arrays."""
    return not isinstance(value, (list, tuple)) and not (
        isinstance(value, Sequence) or hasattr(value, "__next__")
    )


def as_tuple(value: object, name: str, single: bool) -> tuple[object, ...]:
    """The arrays of an argument that has to be what `params` is: one array, or a sequence."""
    if single:
        if isinstance(value, (list, tuple)):
            raise TypeError(f"{name}: expected one tensor, like params, got {type(value).__name__}")
        return (value,)
    if is_single(value) or value is None:
        raise TypeError(
            f"{name}: expected a sequence of tensors, like params, got {type(value).__name__}"
        )
    return tuple(value)  # type: ignore[arg-type]


def native_plan(single: bool, *lists: NativeList) -> _C.Plan:
    """Validate lists against the first of them and build the native plan."""
    return _C.Plan(lists, single)


def bump_versions(*lists: tuple[object, ...]) -> None:
    """Tell autograd that tensors were written in place, as torch's own operators do."""
    tensors = [t for arrays in lists for t in arrays if isinstance(t, Tensor)]
    if not tensors:
        return
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no version counter
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])
