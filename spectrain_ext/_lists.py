"""Arguments that are one array or a sequence of them, and the native plan they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from spectrain_ext import _C

Tensors: TypeAlias = Tensor | Sequence[Tensor]
Gradients: TypeAlias = Tensor | Sequence[Tensor | None] | None


class Role(IntEnum):
    """What a list is to the native plan (csrc/bindings/arrays.h)."""

    PARAMS = 0
    MOMENTUM = 1
    GRADS = 2
    STASHED = 3
    OUT = 4
    SECOND = 5


class Lists:
    """The arguments of one call, each of the kind of the first: one array, or a sequence.

    Args:
        params: the first argument, which all others are measured by.
        name: what errors call it.
        writes: whether the call writes it.
    """

    def __init__(self, params: object, name: str, *, writes: bool) -> None:
        self.single = hasattr(params, "__dlpack__")
        if not self.single and (isinstance(params, str) or not isinstance(params, Iterable)):
            raise TypeError(
                f"{name}: expected a tensor or a sequence of tensors, got {type(params).__name__}"
            )
        self._first = name
        self.params: tuple[object, ...] = self._tuple(params)
        self._lists = [(int(Role.PARAMS), name, writes, self.params)]

    def _tuple(self, value: object) -> tuple[object, ...]:
        return (value,) if self.single else tuple(value)  # type: ignore[arg-type]

    def add(self, role: Role, name: str, value: object, *, writes: bool) -> tuple[object, ...]:
        """Take one more argument and return its arrays."""
        one = not isinstance(value, Iterable) or hasattr(value, "__dlpack__")
        if one is not self.single:
            kind = "one tensor" if self.single else "a sequence of tensors"
            raise TypeError(
                f"{name}: expected {kind}, like {self._first}, got {type(value).__name__}"
            )
        arrays = self._tuple(value)
        self._lists.append((int(role), name, writes, arrays))
        return arrays

    def plan(self, groups: Sequence[int] | None = None) -> _C.Plan:
        """Validate all arguments and build the native plan they make."""
        return _C.Plan(self._lists, () if groups is None else groups, self.single)


def bump_versions(*lists: Sequence[object]) -> None:
    """Tell autograd that tensors were written in place, as torch's own operators do."""
    tensors = [t for arrays in lists for t in arrays if isinstance(t, Tensor)]
    if not tensors:
        return
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no version counter
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])
