"""How tensors get from stage to stage, and what orders their use."""

from .local import Edge, Message, Receiver, Sender, Slot, Transit, Value
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
    "Buffer",
    "CudaStream",
    "Edge",
    "Event",
    "Message",
    "Receiver",
    "Sender",
    "Slot",
    "Stream",
    "Transit",
    "Value",
    "callers_stream",
    "captured",
    "checked_streams",
    "new_stream",
]
