"""Edge: hands tensors from stage to stage within a process, through a ring of receive buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .streams import Buffer, Event, Stream, new_stream

_Likeness = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _likeness(tensor: Tensor) -> _Likeness:
    return tensor.shape, tensor.stride(), tensor.dtype


class Message(NamedTuple):
    """Tensors on their way.

    Attributes:
        tensors: detached; None stands for the gradient of something that nothing depends on.
        single: whether the stage's value is the one tensor itself, not a tuple.
        differentiable: which of the tensors a gradient is wanted for.
    """

    tensors: tuple[Tensor | None, ...]
    single: bool = True
    differentiable: tuple[bool, ...] = ()

    def without_gradient(self) -> Message:
        """The same message, with no gradient wanted back."""
        return Message(self.tensors, self.single, (False,) * len(self.tensors))


class _Slot:
    """A receive buffer; ``arrived``: the copy into it, ``free``: the receiver has done with it."""

    def __init__(self, name: str, copy: Stream, receiver: Stream) -> None:
        self.buffer = Buffer(name)
        self.arrived = copy.event()
        self.free = receiver.event()
        self.storage: list[Tensor | None] = []
        self.likeness: list[_Likeness | None] = []
        self.message: Message | None = None


class Edge:
    """A directed edge with a copy stream and a ring of buffers that live on the receiver's device.

    The sender's tensors are copied even on the same device: an in-place first layer of the receiver
    must not reach what the sender saved for its backward, and a caller may refill its batch.

    Args:
        name: for error messages.
        source: the sender's device, None where it may differ from message to message.
        target: the receiver's device.
        receiver: the stream that uses what arrives.
        depth: minibatches that may be under way or in use at once. A sender has no more than its
            window in flight.
        parts: microbatches per minibatch.
    """

    def __init__(
        self,
        name: str,
        source: torch.device | None,
        target: torch.device,
        receiver: Stream,
        depth: int,
        parts: int,
    ) -> None:
        self.target = target
        self._receiver = receiver
        devices = (target,) if source is None else (source, target)
        self.stream = new_stream(f"copy stream of {name}", *devices)
        # One slot per microbatch index: their sizes then stay the same from minibatch to minibatch.
        self._ring = [
            [_Slot(f"{name}, slot {i}.{j}", self.stream, receiver) for j in range(parts)]
            for i in range(depth)
        ]

    def _slot(self, minibatch: int, microbatch: int) -> _Slot:
        return self._ring[minibatch % len(self._ring)][microbatch]

    def send(
        self, minibatch: int, microbatch: int, message: Message, source: Buffer, ready: Event
    ) -> Event:
        """Copy the message over, after ``ready``; returns the event that it has been read."""
        slot = self._slot(minibatch, microbatch)
        assert slot.message is None, f"{slot.buffer.name} is in use"
        self._fit(slot, message.tensors)
        copy = self.stream
        copy.wait(ready)
        copy.wait(slot.free)
        copy.reads(source)
        copy.writes(slot.buffer)
        with copy:
            for to, tensor in zip(slot.storage, message.tensors, strict=True):
                if to is not None and tensor is not None:
                    to.copy_(tensor, non_blocking=True)
        copy.record(slot.arrived)
        received = tuple(
            None if tensor is None else to
            for to, tensor in zip(slot.storage, message.tensors, strict=True)
        )
        slot.message = Message(received, message.single, message.differentiable)
        return slot.arrived

    def _fit(self, slot: _Slot, tensors: Sequence[Tensor | None]) -> None:
        """Give the slot tensors like these; in a steady state it has them."""
        likeness = [tensor if tensor is None else _likeness(tensor) for tensor in tensors]
        if slot.likeness == likeness:
            return
        slot.likeness = likeness
        with (
            self._receiver
        ):  # which memory of this stream's pool is then safe to reuse, its order tells
            slot.storage = [
                None if tensor is None else torch.empty_like(tensor, device=self.target)
                for tensor in tensors
            ]
        self._receiver.record(slot.free)

    def has(self, minibatch: int, microbatch: int) -> bool:
        """Whether the message has been sent; its copy may still be under way."""
        return self._slot(minibatch, microbatch).message is not None

    def receive(self, minibatch: int, microbatch: int) -> tuple[Message, Buffer]:
        """The message, to be used on the receiver's stream from here on until ``free``."""
        slot = self._slot(minibatch, microbatch)
        assert slot.message is not None, f"nothing arrived in {slot.buffer.name}"
        self._receiver.wait(slot.arrived)
        return slot.message, slot.buffer

    def free(self, minibatch: int, microbatch: int) -> None:
        """The receiver's stream will not use the message after what it has been given so far."""
        slot = self._slot(minibatch, microbatch)
        self._receiver.record(slot.free)
        slot.message = None

    def reset(self) -> None:
        """Forget all messages; what was issued must have been waited for."""
        for slots in self._ring:
            for slot in slots:
                slot.message = None

    def free_storage(self) -> None:
        """Free the receive buffers, outside of a run."""
        for slots in self._ring:
            for slot in slots:
                slot.storage, slot.likeness = [], []


class Transit:
    """Tensors of one stream that another still reads: freed when their own has waited for that.

    Memory freed earlier could be handed out again, and written, while the other stream reads it.
    """

    def __init__(self, owner: Stream, depth: int) -> None:
        self._owner = owner
        self._depth = depth
        self._held: deque[tuple[Event, Buffer, object]] = deque()

    def hold(self, read: Event, buffer: Buffer, tensors: object) -> None:
        """Hold these until ``read``; let go what is ``depth`` calls old, it has long been read."""
        self._held.append((read, buffer, tensors))
        if len(self._held) > self._depth:
            done, old, _ = self._held.popleft()
            self._owner.wait(done)
            self._owner.writes(old)

    def reset(self) -> None:
        """Let go of everything; what was issued must have been waited for."""
        self._held.clear()
