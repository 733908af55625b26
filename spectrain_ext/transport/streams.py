"""Streams and events with one interface for CUDA and the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
from torch import Tensor


class Buffer:
    """Memory that several streams use."""

    def __init__(self, name: str) -> None:
        self.name = name


class Event(Protocol):
    """A point in a stream's work, set by ``Stream.record``."""

    def synchronize(self) -> None:
        """Block the CPU until the point is reached."""


class HostEvent:
    """An event of the CPU, whose work is done when the call returns."""

    __slots__ = ()

    def synchronize(self) -> None: ...


class Stream:
    """A queue of work, which is issued inside ``with stream.using(...)``; this one is the CPU's."""

    __slots__ = ()
    immediate = True  # whether work is done once it has been issued

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def using(
        self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> AbstractContextManager[object]:
        """Make this the current stream of its devices, for work that uses these buffers."""
        return self

    def event(self) -> Event:
        """Return an event to record on this stream, repeatedly."""
        return HostEvent()

    def record(self, event: Event) -> None:
        """Set the event to the end of the work issued so far."""

    def wait(self, event: Event) -> None:
        """Order later work after the event; one that was never recorded has no effect."""
        if type(event) is not HostEvent:  # another device's; CPU work is done
            event.synchronize()

    def reads(self, buffer: Buffer) -> None:
        """Declare a read outside of ``using``, by the caller."""

    def writes(self, buffer: Buffer) -> None:
        """Declare a write outside of ``using``, by the caller, or that the memory is freed."""

    def may_read(self, buffer: Buffer) -> None:
        """Declare that work issued here from now on may read the buffer."""

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Do not reuse this memory, once freed, before the work issued so far is done."""

    def synchronize(self) -> None:
        """Block the CPU until the work issued so far is done."""

    def leave(self) -> None:
        """Stop being the current stream, if an exception bypassed the end of ``with``."""


class CudaStream(Stream):
    """Streams of one or two CUDA devices that act as one."""

    immediate = False

    def __init__(self, streams: list[torch.cuda.Stream]) -> None:
        # A copy between two devices runs on the source's current stream and waits for the target's:
        # both must belong to the copy, or it waits for other work of those devices.
        self._streams = streams
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for stream in self._streams:
            self._entered.enter_context(torch.cuda.stream(stream))

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def event(self) -> Event:
        event: Event = torch.cuda.Event()  # without timing, which is cheaper
        return event

    def record(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(self._streams[-1])  # the end of a copy reaches it too

    def wait(self, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):  # CPU work is done
            for stream in self._streams:
                stream.wait_event(event)

    def lend(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for stream in self._streams:
                tensor.record_stream(stream)

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def leave(self) -> None:
        self._entered.close()


_HOST = Stream()


def host_stream(name: str | None) -> Stream:
    """Return a new stream of the CPU, or the caller's if it has no name."""
    return _HOST


#: Tests replace it by a function whose streams check that events order all uses of buffers.
cpu_stream = host_stream


def new_stream(name: str, *devices: torch.device) -> Stream:
    """Return a new stream for work on these devices; the CPU's if none of them is CUDA."""
    cuda = list(dict.fromkeys(device for device in devices if device.type == "cuda"))
    if cuda:
        return CudaStream([torch.cuda.Stream(device) for device in cuda])
    return cpu_stream(name)


def callers_stream(device: torch.device) -> Stream:
    """Return the stream that the caller's work on the device is issued to."""
    if device.type == "cuda":
        return CudaStream([torch.cuda.current_stream(device)])
    return cpu_stream(None)


def captured(device: torch.device) -> bool:
    """Whether the caller's work on the device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
