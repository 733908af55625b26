"""FanIn, FanOut: a stage's edges to several replicas of a neighbour, of which each has its turn."""

from __future__ import annotations

from collections.abc import Mapping

from spectrain_ext.transport.local import Message, Slot
from spectrain_ext.transport.streams import Buffer, Event, Stream

from .inlet import Arrived, Inlet
from .outlet import Outlet


class FanIn:
    """Receives from the replica that is chosen before each message.

    Args:
        inlets: by the rank that sends.

    Attributes:
        stream: the copy stream of the chosen one.
    """

    def __init__(self, inlets: Mapping[int, Inlet]) -> None:
        self._inlets = inlets
        self._chosen = next(iter(inlets.values()))
        self.stream: Stream = self._chosen.stream
        self._came_by: dict[Slot, Inlet] = {}

    def choose(self, rank: int) -> Inlet:
        """The next message is from there."""
        self._chosen = self._inlets[rank]
        self.stream = self._chosen.stream
        return self._chosen

    def has(self) -> bool:
        """Whether the chosen one's next message has arrived."""
        return self._chosen.has()

    def receive(self) -> Arrived:
        """The chosen one's next message."""
        slot = self._chosen.receive()
        self._came_by[slot] = self._chosen
        return slot

    def free(self, slot: Slot) -> None:
        """The receiver's stream will not use the message after what it has been given so far."""
        self._came_by.pop(slot).free(slot)

    def reset(self) -> None:
        """Forget all messages."""
        self._came_by.clear()
        for inlet in self._inlets.values():
            inlet.reset()

    def free_storage(self) -> None:
        """Free the receive buffers, outside of a run."""
        for inlet in self._inlets.values():
            inlet.free_storage()


class FanOut:
    """Sends to the replica that is chosen before each message.

    Args:
        outlets: by the rank that receives.

    Attributes:
        stream: the copy stream of the chosen one.
    """

    def __init__(self, outlets: Mapping[int, Outlet]) -> None:
        self._outlets = outlets
        self._chosen = next(iter(outlets.values()))
        self.stream: Stream = self._chosen.stream

    def choose(self, rank: int) -> Outlet:
        """The next message goes there."""
        self._chosen = self._outlets[rank]
        self.stream = self._chosen.stream
        return self._chosen

    def send(self, message: Message, source: Buffer, *ready: Event) -> Event:
        """Send the message, after ``ready``; returns the event that it has been read."""
        return self._chosen.send(message, source, *ready)
