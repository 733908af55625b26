"""Streams, and points in their work, with one interface for CUDA and the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import ref

import torch
from torch import Tensor

from spectrain_ext import _C
from spectrain_ext.errors import noted_on


class Buffer:
    """Memory that several streams use."""

    def __init__(self, name: str) -> None:
        self.name = name


class Point:
    """The end of the work that a stream had when ``Stream.mark`` was called; here, the CPU's."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Block the CPU until the work is done."""

    def fix(self) -> object:
        """Prepare the point for another thread, which will wait for it."""


#: The CPU's work is done when the call returns.
DONE = Point()

#: Tensors to copy to, and from.
Pairs = Sequence[tuple[Tensor, Tensor]]


class Stream:
    """A queue of work, which is issued inside ``with stream.using(...)``; this one is the CPU's."""

    __slots__ = ()
    immediate = True  # whether work is done once it has been issued

    def __enter__(self) -> None:
        """Make this the current stream, without issuing work."""

    def __exit__(self, *_: object) -> None: ...

    def using(
        self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> AbstractContextManager[object]:
        """Make this the current stream, for work that uses these buffers."""
        return self

    def copy(
        self, pairs: Pairs, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Copy the second tensor of each pair to the first, of the same shape and dtype."""
        with self.using(reads=reads, writes=writes):
            for to, tensor in pairs:
                to.copy_(tensor, non_blocking=True)

    def mark(self) -> Point:
        """Return the end of the work issued so far."""
        return DONE

    def wait(self, point: Point) -> None:
        """Order later work after the point."""
        if point is not DONE:  # another device's; CPU work is done
            point.synchronize()

    def wait_stream(self, other: Stream) -> None:
        """Order later work after all work issued so far to the other stream."""
        self.wait(other.mark())

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


class CudaPoint(Point):
    """A point in a CUDA stream's work, with an event once something needs one."""

    __slots__ = ("__weakref__", "_event", "number", "stream")

    def __init__(self, stream: CudaStream, number: int | None) -> None:
        self.stream, self.number = stream, number
        self._event: torch.cuda.Event | None = None

    def fix(self) -> torch.cuda.Event:
        if self._event is None:
            spare = self.stream.spare_events
            self._event = spare.pop() if spare else torch.cuda.Event()  # no timing: cheaper
            self.stream.record(self._event)
        return self._event

    def synchronize(self) -> None:
        self.fix().synchronize()

    def __del__(self) -> None:
        if self._event is not None:  # making one takes longer than recording it
            self.stream.spare_events.append(self._event)


class CudaStream(Stream):
    """A CUDA stream.

    Calls of CUDA are what a pipeline of small stages spends most of the CPU's time on, so none is
    made without need. A point gets an event only if a stream waits for it, or if more work is
    issued while something still holds the point. A stream waits for no point that it follows
    already: of its own work, or not after one of the same stream that it has waited for. Where it
    is current, it is not entered again.
    """

    immediate = False

    def __init__(self, stream: torch.cuda.Stream, own: bool = True) -> None:
        self._stream = stream
        self._own = own  # whether all of its work is issued by way of this object
        self._number = 0  # of the next piece of work
        self._issuing = 0  # calls of ``using`` that have not ended
        self._last: ref[CudaPoint] | None = None  # the last point; None: work has come after it
        self.spare_events: list[torch.cuda.Event] = []
        self._followed: dict[CudaStream, int] = {}  # the number of the last point waited for
        self._contexts: list[AbstractContextManager[object]] = []  # that made it current

    # Being the current stream.

    def __enter__(self) -> None:
        current = _here.streams
        if not current or current[-1] is not self:
            # A torch stream as a context takes 0.8 us where ``torch.cuda.stream`` takes 8.8 (H200),
            # but torch before 2.12 refuses one that has been entered.
            entered = bool(self._contexts)
            context = torch.cuda.stream(self._stream) if entered else self._stream
            context.__enter__()
            self._contexts.append(context)
        current.append(self)

    def __exit__(self, *raised: object) -> None:
        current = _here.streams
        current.pop()
        if self._issuing:
            self._issuing -= 1
            self._number += 1
        if not current or current[-1] is not self:
            error = raised[1] if raised else None
            # On a device that has failed this fails too, which is not the first cause.
            with noted_on(error) if isinstance(error, BaseException) else nullcontext():
                self._contexts.pop().__exit__(None, None, None)

    def leave(self) -> None:
        current = _here.streams
        while self in current:
            current[-1].__exit__()

    # Work.

    def using(
        self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> AbstractContextManager[object]:
        self._advance()
        self._issuing += 1
        return self

    def copy(
        self, pairs: Pairs, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        self._advance()
        by_torch = []  # from or to the CPU, where this stream's device is the other one
        for to, tensor in pairs:
            if to.is_cuda and (tensor.is_cuda or to.device != self._stream.device):
                self._copy(to, tensor)
            else:
                by_torch.append((to, tensor))
        if by_torch:
            super().copy(by_torch, reads=reads, writes=writes)

    def _copy(self, to: Tensor, tensor: Tensor) -> None:
        """Copy by one call, without making the stream current.

        torch's ``copy_`` runs on the current stream of the source's device, or of the target's if
        the source is on the CPU. Between two devices it makes and records two events for it.
        """
        source = tensor.device if tensor.is_cuda else self._stream.device
        lazy = tensor.is_conj() or tensor.is_neg()
        if not tensor.is_cuda or tensor.stride() != to.stride() or lazy:
            with self:  # as the target is, in memory that only this stream uses
                like = torch.empty_like(to, device=source)
                tensor = like.copy_(tensor, non_blocking=True)
        if to.device != source:
            _connect(source, to.device)
        on = self._stream
        _C.copy(to.data_ptr(), tensor.data_ptr(), to.nbytes, on.device.index, on.cuda_stream)

    # Points.

    def mark(self) -> Point:
        point = None if self._last is None else self._last()
        if point is None:
            between = self._own and not self._issuing  # two pieces of work that are known here
            point = CudaPoint(self, self._number if between else None)
            if between:
                self._last = ref(point)
            else:
                point.fix()
        return point

    def wait(self, point: Point) -> None:
        if not isinstance(point, CudaPoint) or point.stream is self:  # CPU work is done
            return
        other, number = point.stream, point.number
        if number is not None and self._followed.get(other, -1) >= number:
            return
        self._advance()
        self._stream.wait_event(point.fix())
        if number is not None:
            self._followed[other] = number

    def _advance(self) -> None:
        """End the present point: record it if something holds it."""
        if self._last is not None:
            point = self._last()
            if point is not None:
                point.fix()
            self._last = None
            self._number += 1

    def record(self, event: torch.cuda.Event) -> None:
        """Set an event to the end of the work so far."""
        event.record(self._stream)

    def lend(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


class _Entered(threading.local):
    """The streams of this package that a thread has entered, the current one last."""

    def __init__(self) -> None:
        self.streams: list[CudaStream] = []


_here = _Entered()
_connected: set[tuple[torch.device, torch.device]] = set()


def _connect(source: torch.device, target: torch.device) -> None:
    """Have torch enable direct access between two devices, as it does before a first copy."""
    if (source, target) not in _connected:
        torch.empty(1, device=target).copy_(torch.empty(1, device=source))
        _connected.add((source, target))


_HOST = Stream()


def host_stream(name: str | None) -> Stream:
    """Return a new stream of the CPU, or the caller's if it has no name."""
    return _HOST


#: Tests replace it by a function whose streams check that points order all uses of buffers.
cpu_stream = host_stream


def new_stream(name: str, device: torch.device) -> Stream:
    """Return a new stream for work on the device."""
    if device.type == "cuda":
        return CudaStream(torch.cuda.Stream(device))
    return cpu_stream(name)


def callers_stream(device: torch.device) -> Stream:
    """Return the stream that the caller's work on the device is issued to."""
    if device.type == "cuda":
        return CudaStream(torch.cuda.current_stream(device), own=False)
    return cpu_stream(None)


def captured(device: torch.device) -> bool:
    """Whether the caller's work on the device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
