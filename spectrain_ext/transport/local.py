"""Sends tensors between stages of one process, through a ring of receive buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from .message import NO_HEADER, FlatMemory, Header, Layout, Likeness, Message, likeness
from .streams import DONE, Buffer, Point, Stream, callers_stream, new_stream

_CPU = torch.device("cpu")
#: Bytes. CUDA copies this much pageable memory aside and returns; a larger copy may block the CPU
#: until the device reaches it, after all that the copy waits for.
PAGEABLE_COPY_LIMIT = 2**16


NO_MESSAGE = Message(())  # of a slot that is free


class Slot:
    """A receive buffer. ``arrived``: the copy into it; ``free``: what a copy into it waits for."""

    header: Header
    nbytes = 0  # of its last message
    arrived: Point = DONE
    free: Point = DONE

    def __init__(self, name: str) -> None:
        self.buffer = Buffer(name)
        self.message = NO_MESSAGE
        self.memory = FlatMemory()  # on the receiver's device
        self.staging = FlatMemory()  # of the CPU, on the way there
        self.staged = Buffer(f"host memory of {name}")  # stands for that memory
        self.clear()

    def clear(self) -> None:
        self.likeness: Likeness = []  # of its last message
        self.views: list[Tensor | None] = []
        self.memory.free()
        self.staging.free()


class Sender(Protocol):
    """Sends a stage's messages."""

    stream: Stream
    target: torch.device  # that they are packed on or copied to
    by_reference: bool  # whether it passes on other objects than tensors and constants
    sent_bytes: int  # in all runs

    def send(
        self, message: Message, source: Buffer, *ready: Point, header: Header = NO_HEADER
    ) -> Point:
        """Send the message after ``ready``; return when it has been read."""

    def end(self) -> None:
        """Tell the receiver that the run has no more messages."""


class Receiver(Protocol):
    """Receives a stage's messages, in the order in which they were sent."""

    stream: Stream

    @property
    def arrived(self) -> Sized | None:
        """The messages to receive, with the end; None: ``receive`` blocks the CPU."""

    def receive(self) -> Slot | None:
        """Return the next message, for the receiver's stream until ``free``; None: the end."""

    def free(self, slot: Slot) -> None:
        """Release a message after the work that the receiver's stream has been given so far."""


class Edge:
    """A directed edge: a copy stream, and a ring of buffers on the receiver's device."""

    by_reference = True

    def __init__(
        self,
        name: str,
        source: torch.device | None,  # None: it may differ between messages
        target: torch.device,
        receiver: Stream,
        depth: int,  # messages under way or in use at once: at most a sender's window
        answered: bool = False,  # whether what a sender waits for before it sends a message has
        # come after the receiver's last use of the slot that the message will get
    ) -> None:
        self.target, self._receiver = target, receiver
        sends = source if source is not None and source.type == "cuda" else target
        self.stream = new_stream(f"copy stream of {name}", sends)
        self._stages = target.type == "cuda"
        # On the CPU a copy is done when the call returns: there is nothing to wait for.
        self._immediate = self.stream.immediate and receiver.immediate
        self._answered = answered or self._immediate
        self._from_stage = source is not None
        self._name, self._ring = name, list[Slot]()
        self.deepen(depth)
        self.arrived: deque[Slot | None] = deque()  # None: the end
        self.sent_bytes = 0

    def deepen(self, depth: int) -> None:
        """Have room for at least so many messages; between two runs."""
        names = (f"{self._name}, slot {q}" for q in range(len(self._ring), depth))
        self._ring += [Slot(name) for name in names]
        self._slots = cycle(self._ring)

    def send(
        self, message: Message, source: Buffer, *ready: Point, header: Header = NO_HEADER
    ) -> Point:
        slot = next(self._slots)
        assert slot.message is NO_MESSAGE, f"{slot.buffer.name} is in use"
        tensors, looks = message.tensors, likeness(message.tensors)
        if looks != slot.likeness:
            self._fit(slot, message, looks)
        # Copy even on the same device: an in-place first layer of the receiver must not change what
        # the sender saved for its backward, and a caller may overwrite its batch.
        views = slot.views
        if self._immediate and (self._from_stage or not ready):
            for to, tensor in zip(views, tensors, strict=True):
                if to is not None and tensor is not None:
                    to.copy_(tensor)
        else:
            copy = self.stream
            for point in ready:
                copy.wait(point)
            copy.wait(slot.free)
            if self._stages:
                tensors = self._staged(slot, tensors)
            pairs = [
                (to, tensor)
                for to, tensor in zip(views, tensors, strict=True)
                if to is not None and tensor is not None
            ]
            copy.copy(pairs, reads=(source, slot.staged), writes=(slot.buffer,))
            slot.arrived = copy.mark()
        # Not ``_replace``, which takes 0.4 us more.
        slot.message = Message(tuple(views), message.differentiable, message.form)
        slot.header = header
        self.sent_bytes += slot.nbytes
        self.arrived.append(slot)
        return slot.arrived

    def _fit(self, slot: Slot, message: Message, looks: Likeness) -> None:
        """Fit the slot's memory to the message; in a steady state it already fits."""
        layout = Layout.of(message)
        slot.likeness = []  # until it is complete, in case of an exception
        with self._receiver:
            if slot.memory.fit(layout.offsets()[1], self.target):
                # Memory from this stream's pool is free after the stream's work so far. Only new
                # memory makes the copy wait for that, so that uneven microbatches overlap.
                self._receiver.writes(slot.buffer)
                slot.free = self._receiver.mark()
        slot.views = slot.memory.views(layout)
        slot.nbytes = message.nbytes
        slot.likeness = looks

    def _staged(self, slot: Slot, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return the tensors, with copies in pinned memory of those that may block the CPU."""

        def blocks(tensor: Tensor) -> bool:
            pageable = tensor.device.type == "cpu" and tensor.nbytes > PAGEABLE_COPY_LIMIT
            return pageable and not tensor.is_pinned()

        large = tuple(
            tensor if tensor is not None and blocks(tensor) else None for tensor in tensors
        )
        if all(tensor is None for tensor in large):
            return tensors
        # The last copy from there: the CPU is ahead of the device by all slots at most.
        slot.arrived.synchronize()
        host = callers_stream(_CPU)
        with host.using(writes=(slot.staged,)):
            layout = Layout.of(Message(large))
            slot.staging.fit(layout.offsets()[1], _CPU, pinned=self.target.type == "cuda")
            staged = tuple(
                tensor if to is None or tensor is None else to.copy_(tensor)
                for to, tensor in zip(slot.staging.views(layout), tensors, strict=True)
            )
        self.stream.wait_stream(host)
        return staged

    def begin(self) -> None:
        self.arrived.clear()  # the end of the run before

    def end(self) -> None:
        self.arrived.append(None)

    def receive(self) -> Slot | None:
        slot = self.arrived.popleft()
        if slot is None:
            self.end()  # of all that follow as well
        elif not self._immediate:
            self._receiver.wait(slot.arrived)
        return slot

    def free(self, slot: Slot) -> None:
        if not self._answered:
            slot.free = self._receiver.mark()
        slot.message = NO_MESSAGE

    def reset(self) -> None:
        """Forget all messages; they are freed, or all work has been waited for."""
        for slot in self._ring:
            slot.message = NO_MESSAGE
        self.arrived.clear()

    def free_storage(self) -> None:
        """Free the receive buffers, outside of a run."""
        for slot in self._ring:
            slot.clear()


class Transit:
    """Tensors of one stream that another one still reads; freed after the owner has waited."""

    def __init__(self, owner: Stream) -> None:
        self._owner = owner
        # If freed earlier, this memory could be reused and written while another stream reads it.
        self._held: deque[tuple[Point, Buffer, object]] = deque()

    def hold(self, read: Point, buffer: Buffer, tensors: object) -> None:
        """Hold these until ``read``; if the CPU owns them, it first waits for earlier ones."""
        if read is not DONE:
            if self._owner.immediate:
                self.free()
            self._held.append((read, buffer, tensors))

    def free(self, but: int = 0) -> None:
        """Free all ``but`` the last ones, which have not been read yet, before the owner's work."""
        while len(self._held) > but:
            read, buffer, _ = self._held[0]
            self._owner.wait(read)
            self._owner.writes(buffer)
            self._held.popleft()
