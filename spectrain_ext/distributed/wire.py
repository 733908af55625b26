"""Encodes messages: frames with a binary header, and layouts as JSON."""

from __future__ import annotations

import json
from datetime import timedelta
from struct import Struct
from typing import Any

import torch

from spectrain_ext.transport.message import NO_HEADER, FlatMemory, Header, Layout, TensorLayout

# A header: sequence number, kind, parts of the minibatch, value (float64), samples, bytes of the
# layout's text (0: the last one holds), bytes of the body, whether it follows in the same frame.
_HEADER = Struct("=qqqdqqq?")
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
        self,
        sequence: int,
        header: Header | None,
        text: int = 0,
        nbytes: int = 0,
        inside: bool = False,
    ) -> None:
        """Write the header of a message, or of the end of a run (None)."""
        kind, fields = (_END, NO_HEADER) if header is None else (_DATA, header)
        _HEADER.pack_into(self.whole.numpy().data, 0, sequence, kind, *fields, text, nbytes, inside)

    def read(self, sequence: int) -> tuple[Header | None, int, int, bool]:
        found, kind, *fields, text, nbytes, inside = _HEADER.unpack_from(self.whole.numpy().data)
        if found != sequence or kind not in (_DATA, _END):
            raise ValueError(
                f"expected message {sequence}, got one that says it is {found} of kind {kind}"
            )
        return None if kind == _END else Header(*fields), text, nbytes, inside


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout as JSON: peers are not trusted with pickle."""
    tensors = [
        t and (t.shape, t.stride, str(t.dtype).removeprefix("torch."), t.differentiable)
        for t in layout.tensors
    ]
    return json.dumps([tensors, layout.form]).encode()


def decode_layout(text: bytes) -> Layout:
    def tuples(read: Any) -> Any:
        return tuple(map(tuples, read)) if isinstance(read, list) else read

    tensors, form = tuples(json.loads(text))
    layouts = (t and TensorLayout(t[0], t[1], getattr(torch, t[2]), t[3]) for t in tensors)
    return Layout(tuple(layouts), form)
