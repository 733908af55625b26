"""Moves tensors between stages, and orders their use."""

from .local import Edge, Receiver, Sender, Slot, Transit
from .message import (
    LEAST_BYTES,
    MOST_BYTES,
    NO_HEADER,
    PIECES,
    Header,
    Message,
    Microbatches,
    Value,
    as_value,
    map_tensors,
    tensors_in,
)
from .streams import DONE, Buffer, CudaStream, Point, Stream, callers_stream, captured, new_stream

__all__ = [
    "DONE",
    "LEAST_BYTES",
    "MOST_BYTES",
    "NO_HEADER",
    "PIECES",
    "Buffer",
    "CudaStream",
    "Edge",
    "Header",
    "Message",
    "Microbatches",
    "Point",
    "Receiver",
    "Sender",
    "Slot",
    "Stream",
    "Transit",
    "Value",
    "as_value",
    "callers_stream",
    "captured",
    "map_tensors",
    "new_stream",
    "tensors_in",
]
