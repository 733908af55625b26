"""Moves tensors between stages, and orders their use."""

from .local import Edge, Receiver, Sender, Slot, Transit
from .message import NO_HEADER, Header, Message, Microbatches
from .streams import Buffer, CudaStream, Event, Stream, callers_stream, captured, new_stream

__all__ = [
    "NO_HEADER",
    "Buffer",
    "CudaStream",
    "Edge",
    "Event",
    "Header",
    "Message",
    "Microbatches",
    "Receiver",
    "Sender",
    "Slot",
    "Stream",
    "Transit",
    "callers_stream",
    "captured",
    "new_stream",
]
