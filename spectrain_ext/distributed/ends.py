"""Sends and receives messages on an edge between two processes.

A message is a frame in CPU memory: a header, and room for a body of the size that both ends have
agreed on (at first 0). A larger body, or a new layout, follows as a separate piece. If no message
may be larger than the first, that one sets the size, and later messages are one piece. With NCCL,
bodies go from device to device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.transport import Buffer, Event, Slot, Stream, callers_stream, new_stream
from spectrain_ext.transport.local import NO_MESSAGE
from spectrain_ext.transport.message import NO_HEADER, FlatMemory, Header, Layout, Message, likeness

from .board import Board
from .failures import is_broken_connection
from .links import ConnectionGuard, RemoteEdge
from .wire import (
    ENDLESS,
    HEAD,
    TAG_BODY,
    TAG_FRAME,
    TAG_LAYOUT,
    Frame,
    decode_layout,
    encode_layout,
)

_CPU = torch.device("cpu")
#: Layouts that both ends remember before they start over.
_KINDS = 4096
_Pieces = list[tuple[Tensor, int]]  # tensors sent from CPU memory, with their tags


class _Framed(Slot):
    """A message's ``memory`` on the device, and its ``frame`` in CPU memory for gloo."""

    layout: Layout
    nbytes: int

    def __init__(self, name: str, copy: Stream, user: Stream, in_frame: bool) -> None:
        super().__init__(name, copy, user)
        self.frame = Frame()
        if in_frame:
            self.memory = self.frame
        self.works: list[dist.Work] | None = []  # by gloo; None: a thread will begin them
        self.body: dist.Work | None = None  # by NCCL


class _End:
    """An end of an edge: a ring of slots, and a thread for waits that would block the rank."""

    def __init__(
        self, link: RemoteEdge, device: torch.device, depth: int, board: Board, user: Stream | None
    ) -> None:
        # user: the stream that uses received messages; None for a sender
        does, self._other = ("receiving", link.sender) if user else ("sending", link.receiver)
        self.link, self.target, self._board = link, device, board
        self.stream = new_stream(f"copy stream of {link.name}", device)
        self._thread = new_stream(f"{does} thread of {link.name}", _CPU)
        self._peer = dist.get_group_rank(link.host, link.peer)
        self._pinned = link.staged and device.type == "cuda"
        in_frame = device.type == "cpu" and not link.staged
        self._ring = deque(
            _Framed(f"{link.name}, slot {q}", self.stream, user or self._thread, in_frame)
            for q in range(depth)
        )
        self._connection_guard = ConnectionGuard(board, (self._other,), link.name)
        self._capacity = 0  # bytes of a frame for the body
        self._error: BaseException | None = None

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread, whose error the rank's own thread raises."""

        def guarded() -> None:
            try:
                with callers_stream(self.target).using():  # sets the thread's current device
                    work()
            except BaseException as error:
                with self._board.changed:
                    self._error = error
                    self._board.changed.notify_all()

        self._board.start(name, guarded)

    def _until(self, ready: Callable[[], object]) -> None:
        """In a thread that holds ``changed``: wait until ``ready()``; a failure ends the thread."""
        self._board.changed.wait_for(lambda: ready() or self._board.cause is not None)
        if self._board.cause is not None:
            raise ConnectionAbortedError("the run has failed")

    def _wait_for_thread(self, done: Callable[[], bool]) -> None:
        name = self.link.name
        self._board.wait(lambda: done() or self._error is not None, self._other, name)
        if done():
            return
        error = self._error
        assert error is not None
        if self._board.cause is not None or is_broken_connection(error):
            self._board.lost(self._other, name, error)
        if isinstance(error, ValueError):
            raise ValueError(f"{name}: {error}") from error
        raise error

    def _sent_part(self, frame: Frame) -> Tensor:
        """Return the part of the frame that is sent, allocated if need be."""
        frame.fit(self._capacity, _CPU, self._pinned)
        return frame.whole[: HEAD + self._capacity]

    # Not dist.isend and dist.irecv, whose checks take longer than the call itself when a backward
    # has emptied the caches.

    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        return self.link.host.send([tensor], self._peer, self.link.tags + tag)

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        return self.link.host.recv([tensor], self._peer, self.link.tags + tag)


class RemoteReceiver(_End):
    """The receiving end of an edge; it receives messages ahead of their use.

    A wait for gloo can be neither polled nor interrupted. So a thread here waits for gloo, and the
    rank's own thread waits for that thread, with a deadline and notice of failures.
    """

    arrived = None  # receiving blocks

    def __init__(
        self, link: RemoteEdge, device: torch.device, receiver: Stream, depth: int, board: Board
    ) -> None:
        super().__init__(link, device, depth, board, receiver)
        self._receiver = receiver
        self._landed = self._thread.event()
        self._layouts: list[Layout] = []
        self._heard = self._posted = 0
        self._arrived: deque[_Framed | None] = deque()  # None: the end of the run

    def counts(self) -> dict[str, int]:
        """Return message counts for a report; safe to call from any thread."""
        heard = self._heard
        posted, used = self._posted - heard, heard - len(self._arrived)
        return {"received": heard, "used": used, "receives posted": posted}

    # The receiving thread

    def begin(self) -> None:
        """Receive messages until the end of a run."""
        self._start(self.link.name, self._listen)

    def _listen(self) -> None:
        while True:
            slot = self._take()
            with self._board.changed:
                self._arrived.append(slot)
                self._board.changed.notify_all()
            if slot is None:
                return

    def _take(self) -> _Framed | None:
        """Receive the next message, except a body that goes from device to device."""
        slot = self._next_slot()
        header, number, length, nbytes = slot.frame.read(self._heard)
        self._heard += 1
        if header is None:
            self._recycle(slot)
            return None
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            self._receive(text, TAG_LAYOUT).wait(ENDLESS)
            self._layouts[number:] = [decode_layout(text.numpy().tobytes())]
        layout = self._layouts[number]
        if not layout.places()[1] <= nbytes <= (self._capacity or nbytes):
            raise ValueError(f"the peer announced {layout} and sends {nbytes} bytes")
        slot.header, slot.layout, slot.nbytes = header, layout, nbytes
        if self.link.by_host:
            if nbytes > self._capacity:
                slot.frame.fit(nbytes, _CPU, self._pinned)
                self._receive(slot.frame.bytes[:nbytes], TAG_BODY).wait(ENDLESS)
                if not self.link.dynamic:
                    with self._board.changed:
                        self._capacity = nbytes
                        for waiting in self._ring:
                            self._post(waiting)
            if self.link.staged:
                self._load(slot)
        return slot

    def _load(self, slot: _Framed) -> None:
        copy, nbytes = self.stream, slot.nbytes
        self._thread.writes(slot.staged)
        self._thread.record(self._landed)
        copy.wait(self._landed)
        copy.wait(slot.free)
        with copy.using(reads=(slot.staged,), writes=(slot.buffer,)):
            slot.memory.fit(nbytes, self.target)
            slot.memory.bytes[:nbytes].copy_(slot.frame.bytes[:nbytes], non_blocking=True)
        copy.record(slot.arrived)
        self._thread.wait(slot.arrived)  # then gloo may overwrite the frame

    def _next_slot(self) -> _Framed:
        with self._board.changed:
            self._until(lambda: self._ring)
            slot = self._ring.popleft()
        if not slot.works:
            self._post(slot)
        assert slot.works
        slot.works.pop().wait(ENDLESS)
        return slot

    def _recycle(self, slot: _Framed) -> None:
        with self._board.changed:
            if self._capacity:
                self._post(slot)
            self._ring.append(slot)
            self._board.changed.notify_all()

    def _post(self, slot: _Framed) -> None:
        slot.works = [self._receive(self._sent_part(slot.frame), TAG_FRAME)]
        self._posted += 1

    # The rank's own thread

    def receive(self) -> Slot | None:
        self._wait_for_thread(lambda: bool(self._arrived))
        slot = self._arrived.popleft()
        if slot is None:
            return None
        copy = self.stream
        if not self.link.staged:
            copy.wait(slot.free)
            with copy.using(writes=(slot.buffer,)):  # by gloo or NCCL
                if not self.link.by_host:
                    self._receive_on_device(slot)
            copy.record(slot.arrived)
        self._receiver.wait(slot.arrived)
        slot.message = slot.layout.message(slot.memory.views(slot.layout))
        return slot

    def _receive_on_device(self, slot: _Framed) -> None:
        # As late as the CPU can issue it, because a kernel that waits for data occupies
        # multiprocessors (see CHANNELS). Where the CPUs run ahead of their devices, the kernel
        # starts as soon as the slot is free, and waits here instead of the sender's kernel there.
        slot.memory.fit(slot.nbytes, self.target)
        if not slot.nbytes:
            return
        into, group = slot.memory.bytes[: slot.nbytes], self.link.device
        with self._connection_guard:
            work = dist.irecv(into, self.link.peer, group=group, tag=TAG_BODY)
            assert work is not None
            work.wait()  # only the stream waits

    def free(self, slot: Slot) -> None:
        assert isinstance(slot, _Framed)
        self._receiver.record(slot.free)
        slot.message = NO_MESSAGE
        with self._connection_guard:  # with a broken connection, gloo refuses buffers
            self._recycle(slot)


class RemoteSender(_End):
    """The sending end of an edge; it packs a message's tensors and sends them in one piece."""

    by_reference = False

    def __init__(self, link: RemoteEdge, device: torch.device, depth: int, board: Board) -> None:
        super().__init__(link, device, depth, board, None)
        if link.staged:
            packed = FlatMemory()  # shared by all slots: one message is staged at a time
            for slot in self._ring:
                slot.memory = packed
        self._jobs: deque[tuple[_Framed, _Pieces, bool]] | None = None
        self._sent = self._last_bytes = self.sent_bytes = 0
        self._kinds: dict[object, tuple[Layout, int, int]] = {}  # announced layouts
        self._first: Layout | None = None

    def counts(self) -> dict[str, int]:
        waiting = sum(slot.works is None for slot in self._ring.copy())
        more = {"waiting for the device": waiting} if self.link.staged else {}
        return {"sent": self._sent, "bytes of the last": self._last_bytes, **more}

    def send(
        self, message: Message, source: Buffer, *ready: Event, header: Header = NO_HEADER
    ) -> Event:
        (layout, number, nbytes), text = self._kind_of(message)
        link, copy, slot = self.link, self.stream, self._next_slot()
        self._last_bytes = nbytes
        self.sent_bytes += message.nbytes
        for event in ready:
            copy.wait(event)
        with copy.using(reads=(source,), writes=() if link.staged else (slot.buffer,)):
            slot.memory.fit(nbytes, self.target)
            for to, tensor in zip(slot.memory.views(layout), message.tensors, strict=True):
                if to is not None and tensor is not None:
                    to.copy_(tensor, non_blocking=True)
        if slot.memory is not slot.frame:
            slot.frame.fit(nbytes if link.staged else 0, _CPU, self._pinned)
        if link.staged:
            copy.wait(slot.free)
            with copy.using(writes=(slot.buffer,)):
                slot.frame.bytes[:nbytes].copy_(slot.memory.bytes[:nbytes], non_blocking=True)
        copy.record(slot.arrived)
        if nbytes and not link.by_host:
            # The body goes before its header, which makes the receiver post its receive. So all
            # that a device waits to receive has been sent, and a rank may wait for its own streams.
            # It must not wait for the whole device, which includes this send: the receiver may be
            # far behind.
            body = slot.memory.bytes[:nbytes]
            with copy.using(), self._connection_guard:
                slot.body = dist.isend(body, link.peer, group=link.device, tag=TAG_BODY)
        slot.frame.write(self._sent, header, number, len(text), nbytes)
        pieces = [(slot.frame.whole[: HEAD + self._capacity], TAG_FRAME)]
        if text:
            pieces.append((torch.frombuffer(bytearray(text), dtype=torch.uint8), TAG_LAYOUT))
        if link.by_host and nbytes > self._capacity:
            pieces.append((slot.frame.bytes[:nbytes], TAG_BODY))
            if not link.dynamic:
                self._capacity = nbytes
        self._hand_over(slot, pieces)
        return slot.arrived

    def _kind_of(self, message: Message) -> tuple[tuple[Layout, int, int], bytes]:
        """Return the layout, its number and the body's bytes; and the layout's text if new."""
        tensors, *form = message
        looks = (*likeness(tensors), *form)
        kind = self._kinds.get(looks)
        if kind is not None:
            return kind, b""
        layout = Layout.of(message)
        if len(self._kinds) == _KINDS:  # constants may differ in every message
            self._kinds.clear()
        kind = layout, len(self._kinds), self._checked_bytes(layout)
        self._kinds[looks] = kind
        return kind, encode_layout(layout)

    def _checked_bytes(self, layout: Layout) -> int:
        if self.link.dynamic:
            return layout.places()[1]
        # an empty first message comes from a stage with nothing to train
        if self._first is None or not self._first.places()[1]:
            self._first = layout
        if not self._first.shrinks_to(layout):
            raise ValueError(
                f"{self.link.name} was opened for {self._first}, and a later message has {layout}; "
                "with dynamic_shapes=False every message must have the first one's tensors, "
                "smaller at most in one dimension each"
            )
        return self._first.places()[1]

    def end(self) -> None:
        slot = self._next_slot()
        whole = self._sent_part(slot.frame)
        slot.frame.write(self._sent, None)
        self._hand_over(slot, [(whole, TAG_FRAME)], last=True)

    def _next_slot(self) -> _Framed:
        """Return the next slot; with a correct window its last message arrived long ago."""
        slot = self._ring[0]
        self._wait(slot)
        return slot

    def _wait(self, slot: _Framed) -> None:
        if slot.works is None:
            self._wait_for_thread(lambda: slot.works is not None)
        if not slot.works:
            return
        with self._board.blocked(self._other, self.link.name), self._connection_guard:
            for work in slot.works:
                work.wait(ENDLESS)
            if slot.body is not None:
                with self.stream.using():  # with NCCL, only the stream waits
                    slot.body.wait()
        slot.works, slot.body = [], None

    def _hand_over(self, slot: _Framed, pieces: _Pieces, last: bool = False) -> None:
        self._sent += 1
        self._ring.rotate(-1)
        if not self.link.staged:
            with self._connection_guard:
                slot.works = [self._send(*piece) for piece in pieces]
            return
        # A thread waits for the copy to CPU memory: the rank's own thread never waits for a device.
        slot.works = None
        if self._jobs is None:
            self._jobs = deque()
            self._start(f"staging of {self.link.name}", partial(self._send_staged, self._jobs))
        with self._board.changed:
            self._jobs.append((slot, pieces, last))
            self._board.changed.notify_all()
        if last:
            self._jobs = None

    def _send_staged(self, jobs: deque[tuple[_Framed, _Pieces, bool]]) -> None:
        last = False
        while not last:
            with self._board.changed:
                self._until(lambda: jobs)
                slot, pieces, last = jobs.popleft()
            self._thread.wait(slot.arrived)
            self._thread.reads(slot.buffer)
            self._thread.record(slot.free)
            works = [self._send(*piece) for piece in pieces]
            with self._board.changed:
                slot.works = works
                self._board.changed.notify_all()

    def flush(self) -> None:
        for slot in self._ring:
            self._wait(slot)
