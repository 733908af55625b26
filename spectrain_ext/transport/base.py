"""Sender and Receiver: the two ends of an edge, as stages use them."""

from __future__ import annotations

from typing import Protocol

import torch

from .local import Message, Slot
from .streams import Buffer, Event, Stream


class Sender(Protocol):
    """Where a stage's messages go."""

    stream: Stream

    def send(self, message: Message, source: Buffer, *ready: Event) -> Event:
        """Send the message, after ``ready``; returns the event that it has been read."""


class Entrance(Sender, Protocol):
    """Where the caller's tensors go; ``target``: the device that they are copied to."""

    target: torch.device


class Receiver(Protocol):
    """Where a stage's messages come from, in the order in which they were sent."""

    stream: Stream

    def has(self) -> bool:
        """Whether the next message has been sent."""

    def receive(self) -> Slot:
        """The next message, to be used on the receiver's stream from here on until ``free``."""

    def free(self, slot: Slot) -> None:
        """The receiver's stream will not use the message after what it has been given so far."""

    def reset(self) -> None:
        """Forget all messages: all have been freed, or what was issued has been waited for."""

    def free_storage(self) -> None:
        """Free the receive buffers, outside of a run."""
