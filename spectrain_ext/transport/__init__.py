"""How tensors get from stage to stage, and what orders their use."""

from .local import Edge, Message, Slot, Transit
from .streams import Buffer, Event, Stream, callers_stream, checked_streams, new_stream

__all__ = [
    "Buffer",
    "Edge",
    "Event",
    "Message",
    "Slot",
    "Stream",
    "Transit",
    "callers_stream",
    "checked_streams",
    "new_stream",
]
