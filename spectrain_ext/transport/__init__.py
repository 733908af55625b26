"""How tensors get from stage to stage, and what orders their use."""

from .local import NO_HEADER, Edge, Header, Message, Receiver, Sender, Slot, Transit
from .streams import (
    Buffer,
    CudaStream,
    Event,
    Stream,
    callers_stream,
    captured,
    checked_streams,
    new_stream,
)
from .value import VALUES, Value, as_value, each, tensors_in, tensors_of

__all__ = [
    "NO_HEADER",
    "VALUES",
    "Buffer",
    "CudaStream",
    "Edge",
    "Event",
    "Header",
    "Message",
    "Receiver",
    "Sender",
    "Slot",
    "Stream",
    "Transit",
    "Value",
    "as_value",
    "callers_stream",
    "captured",
    "checked_streams",
    "each",
    "new_stream",
    "tensors_in",
    "tensors_of",
]
