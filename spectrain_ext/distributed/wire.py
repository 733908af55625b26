"""Encodes messages: frames with a binary header, and layouts as JSON."""

from __future__ import annotations

import json
from datetime import timedelta
from struct import Struct
from typing import Any

import torch

from spectrain_ext.transport.message import (
    CONSTANTS,
    CONTAINERS,
    FLAT,
    NO_HEADER,
    TENSOR,
    FlatMemory,
    Form,
    Header,
    Layout,
    TensorLayout,
    places_in,
)

# A header: sequence number, kind, parts of the minibatch, value (float64), samples, number of the
# layout, bytes of its text (0 if announced before), bytes of the body.
_HEADER = Struct("=qqqdqqqq")
_DATA, _END = 1, 2
# Bytes of a frame before the body, a multiple of the alignment.
HEAD = 256
# The kinds of pieces of a message, all sent in one group.
TAG_FRAME, TAG_LAYOUT, TAG_BODY = 1, 2, 3
TAGS = 4  # tags reserved per link
TAG_NEVER = 2**16  # of no message; above all others
# A wait for gloo cannot be interrupted, and one that times out breaks all connections of its group.
# So the board keeps the deadlines, and breaks the connections after a failure.
ENDLESS = timedelta(days=365)


class Frame(FlatMemory):
    """CPU memory for a header and the body after it."""

    def __init__(self) -> None:
        super().__init__(HEAD)

    def write(
        self, sequence: int, header: Header | None, number: int = 0, text: int = 0, nbytes: int = 0
    ) -> None:
        """Write the header of a message, or of the end of a run (None)."""
        kind, fields = (_END, NO_HEADER) if header is None else (_DATA, header)
        _HEADER.pack_into(self.whole.numpy().data, 0, sequence, kind, *fields, number, text, nbytes)

    def read(self, sequence: int) -> tuple[Header | None, int, int, int]:
        found, kind, *fields, number, text, nbytes = _HEADER.unpack_from(self.whole.numpy().data)
        if found != sequence or kind not in (_DATA, _END):
            raise ValueError(
                f"expected message {sequence}, got one that says it is {found} of kind {kind}"
            )
        return None if kind == _END else Header(*fields), number, text, nbytes


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout as JSON: peers are not trusted with pickle."""
    tensors = [
        t and (t.shape, t.stride, str(t.dtype).removeprefix("torch."), t.differentiable)
        for t in layout.tensors
    ]
    return json.dumps({"tensors": tensors, "form": layout.form}).encode()


def decode_layout(text: bytes) -> Layout:
    """Decode a layout from ``encode_layout``; ValueError for anything else a peer sends."""
    try:
        read = json.loads(text)
        tensors = tuple(None if t is None else _tensor_layout(*t) for t in read["tensors"])
        form = _form(read["form"]) if read["form"] else FLAT
        if form != FLAT and len([*places_in(form)]) != len(tensors):
            raise TypeError(f"{len(tensors)} tensors have other places")
        return Layout(tensors, form)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"not the layout of a message: {text[:200]!r} ({error})") from None


def _form(read: Any) -> Form:
    if isinstance(read, str):
        if read != TENSOR and not isinstance(json.loads(read), CONSTANTS):
            raise TypeError(f"{read!r} is no constant")
        return read
    kind, *members = read
    if kind == "dict":
        names, *members = members
        named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not named or len(set(names)) != len(members):
            raise TypeError(f"{names!r} are no names of {len(members)} members")
        return (kind, tuple(names), *map(_form, members))
    if kind not in CONTAINERS:
        raise TypeError(f"{kind!r} is no container")
    return (kind, *map(_form, members))


def _tensor_layout(
    shape: list[int], stride: list[int], dtype: str, differentiable: bool
) -> TensorLayout:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    numbers = [*shape, *stride]
    if len(shape) != len(stride) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise TypeError(f"shape {shape!r} and strides {stride!r} are no layout")
    # Strides that exceed the tensor's memory would read its neighbours.
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    layout = TensorLayout(tuple(shape), tuple(stride), found, bool(differentiable))
    if 0 not in shape and span * found.itemsize > layout.nbytes:
        raise TypeError(f"strides {stride!r} reach beyond shape {shape!r}")
    return layout
