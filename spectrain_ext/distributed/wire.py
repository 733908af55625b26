"""What goes over a link: headers, layouts, and messages in one flat piece of memory each."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrain_ext.transport.local import Header, Message

# A header, as int64: sequence number, its kind, parts of the minibatch, the bits of a float64 that
# travels along, number of the layout, its bytes as text (0 if it has been announced), bytes of the
# body.
HEADER = 7
# Bytes before a body that travels in one piece with its header: whole alignment units.
HEAD = 256
DATA, END = 1, 2
# The same two ranks use the same group: what a message is for.
TAG_HEADER, TAG_LAYOUT, TAG_BODY = 1, 2, 3
TAGS = 4  # of a link, at most
# gloo cannot be interrupted, and a wait that times out breaks its connection: the threads that
# wait are ended with the process, and deadlines are the board's.
ENDLESS = timedelta(days=365)
# Every tensor begins on a boundary of this many bytes.
_ALIGNMENT = 256


def numbers_of(header: Header) -> tuple[int, int]:
    """A header as it travels."""
    return header.parts, int(np.float64(header.value).view(np.int64))


def header_of(parts: int, value: int) -> Header:
    """It, as it has arrived."""
    return Header(parts, float(np.int64(value).view(np.float64)))


class TensorLayout(NamedTuple):
    """One tensor of a message: shape, strides of a dense tensor, dtype, is its gradient wanted."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def nbytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize

    def __str__(self) -> str:
        gradient = "" if self.differentiable else ", without gradient"
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} {list(self.shape)} with strides {list(self.stride)}{gradient}"


class Layout(NamedTuple):
    """What a message looks like.

    Attributes:
        tensors: its tensors, None for one that is not sent.
        single: whether the value is the one tensor itself, not a tuple or a dict.
        keys: the tensors' names, where it is a dict.
    """

    tensors: tuple[TensorLayout | None, ...]
    single: bool
    keys: tuple[str, ...] | None = None

    @staticmethod
    def of(message: Message) -> Layout:
        """The layout of a message; strides are those of ``torch.empty_like``."""
        flags = message.differentiable or (True,) * len(message.tensors)
        return Layout(
            tuple(
                None
                if tensor is None
                else TensorLayout(tuple(tensor.shape), _dense(tensor), tensor.dtype, flag)
                for tensor, flag in zip(message.tensors, flags, strict=True)
            ),
            message.single,
            message.keys,
        )

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
        return [
            None
            if tensor is None
            else memory[begin : begin + tensor.nbytes]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride)
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
        for mine, its in zip(self.tensors, other.tensors, strict=True):
            if mine is None or its is None:
                if its is not None:
                    return False
                continue
            if mine.dtype != its.dtype or mine.differentiable != its.differentiable:
                return False
            if len(mine.shape) != len(its.shape):
                return False
            changed = [(a, b) for a, b in zip(mine.shape, its.shape, strict=True) if a != b]
            if len(changed) > 1 or any(b > a for a, b in changed):
                return False
        return True

    def to_bytes(self) -> bytes:
        """As JSON, which is all that a peer is trusted with."""
        tensors = [
            None
            if tensor is None
            else [
                tensor.shape,
                tensor.stride,
                str(tensor.dtype).removeprefix("torch."),
                tensor.differentiable,
            ]
            for tensor in self.tensors
        ]
        form = {"tensors": tensors, "single": self.single, "keys": self.keys}
        return json.dumps(form).encode()

    @staticmethod
    def from_bytes(text: bytes) -> Layout:
        """Read ``to_bytes``.

        Raises:
            ValueError: it is not what ``to_bytes`` writes.
        """
        try:
            read = json.loads(text)
            tensors = tuple(None if t is None else _tensor_layout(*t) for t in read["tensors"])
            keys = read["keys"]
            if keys is not None:
                keys = _names(keys, len(tensors))
            return Layout(tensors, bool(read["single"]), keys)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the layout of a message: {text[:200]!r} ({error})") from None

    def __str__(self) -> str:
        each = ["nothing" if t is None else str(t) for t in self.tensors]
        if self.keys is not None:
            each = [f"{key!r}: {of}" for key, of in zip(self.keys, each, strict=True)]
        tensors = ", ".join(each)
        if self.keys is not None:
            return f"{{{tensors}}}"
        return tensors if self.single else f"({tensors})"


class FlatMemory:
    """A flat piece of memory for a message, and the tensors of the layout that it last had.

    Attributes:
        frame: all of it: room for a header, then the body.
        bytes: the body.
        header: the header's numbers; only where the memory is the CPU's.
    """

    header: NDArray[np.int64]

    def __init__(self) -> None:
        self.frame = self.bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._views: list[Tensor | None] = []

    def fit(self, nbytes: int, device: torch.device, pinned: bool = False) -> None:
        """Have a body of at least so many bytes; pinned: that a GPU copies beside the host."""
        if self.frame.numel() < HEAD + nbytes or self.frame.device != device:
            self.frame = torch.empty(
                HEAD + nbytes, dtype=torch.uint8, device=device, pin_memory=pinned
            )
            self.bytes = self.frame[HEAD:]
            self._layout = None
            if device.type == "cpu":
                self.header = self.frame[: 8 * HEADER].view(torch.int64).numpy()

    def views(self, layout: Layout) -> list[Tensor | None]:
        """The tensors of a layout in the body."""
        if self._layout != layout:
            self._layout, self._views = layout, layout.views(self.bytes)
        return self._views


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """The strides without gaps and overlaps that keep the order of the dimensions."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def _names(keys: object, count: int) -> tuple[str, ...]:
    names = tuple(keys) if isinstance(keys, list) else ()
    if len(set(names)) != count or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{keys!r} are no names of {count} tensors")
    return names


def _tensor_layout(
    shape: list[int], stride: list[int], dtype: str, differentiable: bool
) -> TensorLayout:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    numbers = [*shape, *stride]
    if len(shape) != len(stride) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise TypeError(f"shape {shape!r} and strides {stride!r} are no layout")
    # A stride out of the tensor's own memory would read what is beside it.
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    layout = TensorLayout(tuple(shape), tuple(stride), found, bool(differentiable))
    if 0 not in shape and span * found.itemsize > layout.nbytes:
        raise TypeError(f"strides {stride!r} reach beyond shape {shape!r}")
    return layout
