"""Message: what goes from stage to stage, how it is laid out, and the memory that it arrives in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

#: One argument of a module, whichever it is.
Value = Tensor | tuple[Tensor, ...] | dict[str, Tensor]

#: For messages.
VALUES = "a tensor, a tuple of tensors, or a dict of them by name"

# Every tensor of a message begins on a boundary of this many bytes.
_ALIGNMENT = 256


def as_value(given: object, where: str, note: str = "") -> Value:
    """The value that was given, maybe as a list or as a mapping that is no dict."""
    if isinstance(given, Tensor):
        return given
    if isinstance(given, Mapping) and given:
        found = {}
        for key, member in given.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}{note}: expected strings as keys, got {key!r}")
            found[key] = _tensor(member, f"{where}[{key!r}]{note}")
        return found
    if isinstance(given, (tuple, list)) and given:
        return tuple(_tensor(member, f"{where}[{n}]{note}") for n, member in enumerate(given))
    kind = "an empty" if isinstance(given, (Mapping, tuple, list)) else "a"
    raise TypeError(f"{where}{note}: expected {VALUES}, got {kind} {type(given).__name__}")


def _tensor(given: object, where: str) -> Tensor:
    if not isinstance(given, Tensor):
        what = "None; leave it out" if given is None else f"a {type(given).__name__}"
        raise TypeError(f"{where}: expected a tensor, got {what}")
    return given


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    return value if isinstance(value, tuple) else tuple(value.values())


def each(value: Value, apply: Callable[[Tensor], Tensor]) -> Value:
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, Mapping):
        return {key: apply(tensor) for key, tensor in value.items()}
    return tuple(apply(tensor) for tensor in value)


def tensors_in(anything: object) -> Iterator[Tensor]:
    """The tensors in whatever a model returns: containers and dataclasses, however nested."""
    if isinstance(anything, Tensor):
        yield anything
    elif isinstance(anything, Mapping):
        for member in anything.values():
            yield from tensors_in(member)
    elif isinstance(anything, (tuple, list)):
        for member in anything:
            yield from tensors_in(member)
    elif is_dataclass(anything) and not isinstance(anything, type):
        for field in fields(anything):
            yield from tensors_in(getattr(anything, field.name, None))


class Header(NamedTuple):
    """What travels with a message."""

    parts: int = 1  # microbatches of its minibatch
    # With an input, the samples of the minibatch, 0 where it is not cut; with a gradient, the loss
    # as far as it is known, or nan.
    value: float = 0.0


NO_HEADER = Header()


class Message(NamedTuple):
    """Tensors on their way."""

    tensors: tuple[Tensor | None, ...]  # detached; None: the gradient of what nothing depends on
    single: bool = True  # whether the stage's value is the tensor itself, not a tuple or a dict
    differentiable: tuple[bool, ...] = ()  # whether a gradient of each is wanted
    keys: tuple[str, ...] | None = None  # where the value is a dict

    def with_gradient(self, wanted: bool) -> Message:
        """The same, of which gradients are wanted for all that can have one, or for none."""
        differentiable = (False,) * len(self.tensors)
        if wanted:
            differentiable = tuple(
                t is not None and (t.is_floating_point() or t.is_complex()) for t in self.tensors
            )
        return Message(self.tensors, self.single, differentiable, self.keys)


#: What tells that a message is laid out like one before: asking takes a third of the time of
#: describing it anew.
Likeness = list[tuple[object, ...] | None]


def likeness(tensors: Iterable[Tensor | None]) -> Likeness:
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]


class TensorLayout(NamedTuple):
    """One tensor of a message: shape, strides of a dense tensor, dtype, is its gradient wanted."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def shrinks_to(self, other: TensorLayout) -> bool:
        # With a gradient or without one: between runs parameters may be frozen.
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return False
        changed = [(a, b) for a, b in zip(self.shape, other.shape, strict=True) if a != b]
        return len(changed) <= 1 and all(b < a for a, b in changed)

    def __str__(self) -> str:
        gradient = "" if self.differentiable else ", without gradient"
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} {list(self.shape)} with strides {list(self.stride)}{gradient}"


class Layout(NamedTuple):
    """What a message looks like: its tensors, None for one that is not sent, and their form."""

    tensors: tuple[TensorLayout | None, ...]
    single: bool
    keys: tuple[str, ...] | None = None

    @staticmethod
    def of(message: Message) -> Layout:
        """The layout of a message; strides are those of ``torch.empty_like``."""
        flags = message.differentiable or (True,) * len(message.tensors)
        tensors = tuple(
            None if t is None else TensorLayout(tuple(t.shape), _dense(t), t.dtype, flag)
            for t, flag in zip(message.tensors, flags, strict=True)
        )
        return Layout(tensors, message.single, message.keys)

    def places(self) -> tuple[list[int], int]:
        """Where each tensor begins, in bytes, and how many bytes there are in all."""
        begin, places = 0, []
        for tensor in self.tensors:
            places.append(begin)
            if tensor is not None:
                begin += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return places, begin

    def views(self, memory: Tensor) -> list[Tensor | None]:
        """The tensors in a flat uint8 tensor that has room for them."""
        places, _ = self.places()
        # By data each has a version counter of its own: an in-place layer may change one of them
        # while autograd keeps another.
        return [
            None
            if tensor is None
            else memory[begin : begin + tensor.nbytes]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride)
            .data
            for begin, tensor in zip(places, self.tensors, strict=True)
        ]

    def message(self, tensors: list[Tensor | None]) -> Message:
        flags = tuple(tensor is not None and tensor.differentiable for tensor in self.tensors)
        return Message(tuple(tensors), self.single, flags, self.keys)

    def shrinks_to(self, other: Layout) -> bool:
        """Whether the other has the same tensors, smaller in at most one dimension each."""
        if (self.single, self.keys) != (other.single, other.keys):
            return False
        if len(self.tensors) != len(other.tensors):
            return False
        return all(
            its is None or (mine is not None and mine.shrinks_to(its))
            for mine, its in zip(self.tensors, other.tensors, strict=True)
        )

    def __str__(self) -> str:
        each = ["nothing" if t is None else str(t) for t in self.tensors]
        if self.keys is not None:
            named = (f"{key!r}: {of}" for key, of in zip(self.keys, each, strict=True))
            return f"{{{', '.join(named)}}}"
        return ", ".join(each) if self.single else f"({', '.join(each)})"


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """The strides without gaps and overlaps that keep the order of the dimensions."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


class FlatMemory:
    """Flat memory for a message: a head, then the body (``bytes``), both together ``whole``."""

    def __init__(self, head: int = 0) -> None:
        self._head = head
        self.free()

    def free(self) -> None:
        self.whole = self.bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None  # that it last had
        self._views: list[Tensor | None] = []

    def fit(self, nbytes: int, device: torch.device, pinned: bool = False) -> bool:
        """Have a body of so many bytes, maybe pinned for copies beside the host. Is it new?"""
        size = self._head + nbytes
        if self.whole.numel() >= size and self.whole.device.type == device.type:
            return False
        with torch.inference_mode(False):  # of a message within, whose memory others use later
            self.whole = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
            self.bytes = self.whole[self._head :]
        self._layout = None
        return True

    def views(self, layout: Layout) -> list[Tensor | None]:
        if self._layout != layout:
            with torch.inference_mode(False):
                self._layout, self._views = layout, layout.views(self.bytes)
        return self._views
