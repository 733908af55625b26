"""How tensors get from stage to stage, and what orders their use."""

from .local import Edge, Receiver, Sender, Slot, Transit
from .message import (
    NO_HEADER,
    VALUES,
    Header,
    Message,
    Value,
    as_value,
    each,
    tensors_in,
    tensors_of,
)
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
