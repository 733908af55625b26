"""Sends and receives messages on an edge between two processes.

A message is a frame in CPU memory, a header and a body. A new layout follows as a piece of its own,
and so does a body that is larger than all that were in use when the frame's receive was posted:
gloo accepts a message that is shorter than its receive. With NCCL, bodies go from device to device.
"""

from __future__ import annotations

import json
from collections import deque
from datetime import timedelta
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.transport import Buffer, Point, Slot, Stream, callers_stream, new_stream
from spectrain_ext.transport.local import NO_MESSAGE
from spectrain_ext.transport.message import (
    NO_HEADER,
    FlatMemory,
    Header,
    Layout,
    Message,
    TensorLayout,
    likeness,
)

from .board import Board
from .failures import is_broken_connection
from .links import TAG_BODY, TAG_FRAME, TAG_LAYOUT, ConnectionGuard, RemoteEdge

_CPU = torch.device("cpu")
# A header: number of the message, whether it ends the run; parts of the minibatch, share (float64),
# samples; number of the layout and bytes of its text (0: announced before); bytes of the body, and
# whether it follows in the same frame.
_HEADER = Struct("=q?qdqqqq?")
#: Layouts that both ends remember before they start over: constants may differ in every message.
_KINDS = 4096
# Bytes of a frame before the body, a multiple of the alignment.
_HEAD = 256
# A wait for gloo cannot be interrupted, and one that times out breaks all connections of its group.
# So the board keeps the deadlines, and breaks the connections after a failure.
_ENDLESS = timedelta(days=365)


class _Frame(FlatMemory):
    """CPU memory for a header and the body after it."""

    def __init__(self) -> None:
        super().__init__(_HEAD)

    def write(self, number: int, header: Header | None, *sizes: int) -> None:
        """Write the header of a message, or of the end of a run (None)."""
        fields = header is None, *(header or NO_HEADER), *(sizes or (0, 0, 0, True))
        _HEADER.pack_into(self.whole.numpy().data, 0, number, *fields)

    def read(self, number: int) -> tuple[Header | None, int, int, int, bool]:
        found, ends, parts, share, samples, *sizes = _HEADER.unpack_from(self.whole.numpy().data)
        if found != number:
            raise ValueError(f"expected message {number}, got {found}")
        return None if ends else Header(parts, share, samples), *sizes


def _encoded(layout: Layout) -> bytes:
    """Encode a layout as JSON: peers are not trusted with pickle."""
    tensors = [
        t and (t.shape, t.stride, str(t.dtype).removeprefix("torch."), t.differentiable)
        for t in layout.tensors
    ]
    return json.dumps([tensors, layout.form]).encode()


def _decoded(text: bytes) -> Layout:
    def tuples(read: Any) -> Any:
        return tuple(map(tuples, read)) if isinstance(read, list) else read

    tensors, form = tuples(json.loads(text))
    layouts = (t and TensorLayout(t[0], t[1], getattr(torch, t[2]), t[3]) for t in tensors)
    return Layout(tuple(layouts), form)


class _Framed(Slot):
    """A message's ``memory`` on the device, and its ``frame`` in CPU memory for gloo."""

    layout: Layout
    nbytes = 0  # of the body of its last message

    def __init__(self, name: str, in_frame: bool) -> None:
        super().__init__(name)
        self.frame = _Frame()
        if in_frame:
            self.memory = self.frame
        self.works: list[dist.Work] = []  # by gloo
        self.body: dist.Work | None = None  # by NCCL


class _End:
    """An end of an edge, with a ring of slots."""

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
        self._user = user or self._thread
        # Shared by all slots of a sender: one message is staged at a time.
        self._packed = FlatMemory() if link.staged and not user else None
        self._ring = deque[_Framed]()
        self.deepen(depth)
        self.connection_guard = ConnectionGuard(board, (self._other,), link.name)
        self._capacity = 0  # bytes of a posted frame for the body

    def deepen(self, depth: int) -> None:
        """Have room for at least so many messages, here and at the other end; between two runs."""
        in_frame = self.target.type == "cpu" and not self.link.staged
        for q in range(len(self._ring), depth):
            name = f"{self.link.name}, slot {q}"
            self._ring.append(_Framed(name, in_frame))
            self._ring[-1].memory = self._packed or self._ring[-1].memory


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
        self._heard = 0  # messages
        self._layouts: list[Layout] = []
        self._arrived: deque[_Framed | None] = deque()  # None: the end of the run
        self._error: BaseException | None = None  # of the thread

    # The receiving thread

    def begin(self) -> None:
        """Receive messages until the end of a run."""
        if not self.link.evaluates:
            for slot in self._ring:
                if not slot.works:
                    self._post(slot)
        self._board.start(self.link.name, self._listen)

    def _listen(self) -> None:
        changed, ended = self._board.changed, False
        try:
            with callers_stream(self.target).using():  # sets the thread's current device
                while not ended:
                    slot = self._take()
                    ended = slot is None
                    with changed:
                        self._arrived.append(slot)
                        changed.notify_all()
        except BaseException as error:
            with changed:
                self._error = error
                changed.notify_all()

    def _take(self) -> _Framed | None:
        """Receive the next message, except a body that goes from device to device."""
        slot = self._next_slot()
        header, kind, length, nbytes, inside = slot.frame.read(self._heard)
        self._heard += 1
        if header is None:
            self._recycle(slot)
            return None
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            self._receive(text, TAG_LAYOUT).wait(_ENDLESS)
            self._layouts[kind:] = [_decoded(text.numpy().tobytes())]
        slot.header, slot.layout, slot.nbytes = header, self._layouts[kind], nbytes
        if self.link.by_host:
            if not inside:
                slot.frame.fit(nbytes, _CPU, self._pinned)
                self._receive(slot.frame.bytes[:nbytes], TAG_BODY).wait(_ENDLESS)
            self._capacity = max(self._capacity, nbytes)
            if self.link.staged:
                self._load(slot)
        return slot

    def _load(self, slot: _Framed) -> None:
        copy, nbytes = self.stream, slot.nbytes
        self._thread.writes(slot.staged)
        copy.wait_stream(self._thread)
        copy.wait(slot.free)
        with copy.using(reads=(slot.staged,), writes=(slot.buffer,)):
            slot.memory.fit(nbytes, self.target)
            slot.memory.bytes[:nbytes].copy_(slot.frame.bytes[:nbytes], non_blocking=True)
        slot.arrived = copy.mark()
        slot.arrived.fix()  # for the rank's own thread
        self._thread.wait(slot.arrived)  # then gloo may overwrite the frame

    def _next_slot(self) -> _Framed:
        board = self._board
        with board.changed:
            board.changed.wait_for(lambda: self._ring or board.cause is not None)
            if board.cause is not None:
                raise ConnectionAbortedError("the run has failed")
            slot = self._ring.popleft()
        if not slot.works:
            self._post(slot)
        slot.works.pop().wait(_ENDLESS)
        return slot

    def _recycle(self, slot: _Framed) -> None:
        with self._board.changed:
            if not self.link.evaluates:
                self._post(slot)
            self._ring.append(slot)
            self._board.changed.notify_all()

    def _post(self, slot: _Framed) -> None:
        slot.frame.fit(self._capacity, _CPU, self._pinned)
        slot.works = [self._receive(slot.frame.whole, TAG_FRAME)]

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        # Not dist.irecv, nor dist.isend below, whose checks take longer than the call itself when a
        # backward has emptied the caches.
        return self.link.host.recv([tensor], self._peer, self.link.tags + tag)

    # The rank's own thread

    def receive(self) -> Slot | None:
        board, name = self._board, self.link.name
        board.wait(lambda: bool(self._arrived or self._error), self._other, name)
        if not self._arrived:
            error = self._error
            assert error is not None
            if board.cause is not None or is_broken_connection(error):
                board.lost(self._other, name, error)
            raise error
        slot = self._arrived.popleft()
        if slot is None:
            return None
        copy = self.stream
        if not self.link.staged:
            copy.wait(slot.free)
            with copy.using(writes=(slot.buffer,)):  # by gloo or NCCL
                if not self.link.by_host:
                    self._receive_on_device(slot)
            slot.arrived = copy.mark()
        self._user.wait(slot.arrived)
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
        with self.connection_guard:
            work = dist.irecv(into, self.link.peer, group=group, tag=TAG_BODY)
            assert work is not None
            work.wait()  # only the stream waits

    def free(self, slot: Slot) -> None:
        assert isinstance(slot, _Framed)
        slot.free = self._user.mark()
        slot.free.fix()  # for the receiving thread
        slot.message = NO_MESSAGE
        with self.connection_guard:  # with a broken connection, gloo refuses buffers
            self._recycle(slot)


class RemoteSender(_End):
    """The sending end of an edge; it packs a message's tensors and sends them in one piece."""

    by_reference = False

    def __init__(self, link: RemoteEdge, device: torch.device, depth: int, board: Board) -> None:
        super().__init__(link, device, depth, board, None)
        self._sent = self.sent_bytes = 0
        self._kinds: dict[object, tuple[int, Layout, int]] = {}  # number, layout, bytes

    def send(
        self, message: Message, source: Buffer, *ready: Point, header: Header = NO_HEADER
    ) -> Point:
        link, copy, slot, text = self.link, self.stream, self._next_slot(), b""
        looks = (*likeness(message.tensors), *message[1:])
        if looks not in self._kinds:
            if len(self._kinds) == _KINDS:
                self._kinds.clear()
            layout = Layout.of(message)
            text = _encoded(layout)
            self._kinds[looks] = len(self._kinds), layout, layout.offsets()[1]
        kind, layout, nbytes = self._kinds[looks]
        self.sent_bytes += message.nbytes
        for point in ready:
            copy.wait(point)
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
        slot.arrived = copy.mark()
        if nbytes and not link.by_host:
            # The body goes before its header, which makes the receiver post its receive. So all
            # that a device waits to receive has been sent, and a rank may wait for its own streams.
            # It must not wait for the whole device, which includes this send: the receiver may be
            # far behind.
            body = slot.memory.bytes[:nbytes]
            with copy.using(), self.connection_guard:
                slot.body = dist.isend(body, link.peer, group=link.device, tag=TAG_BODY)
        inside = link.by_host and nbytes <= self._capacity
        slot.frame.write(self._sent, header, kind, len(text), nbytes, inside)
        pieces = [(slot.frame.whole[: _HEAD + (nbytes if inside else 0)], TAG_FRAME)]
        if text:
            pieces.append((torch.frombuffer(bytearray(text), dtype=torch.uint8), TAG_LAYOUT))
        if link.by_host and not inside:
            pieces.append((slot.frame.bytes[:nbytes], TAG_BODY))
        slot.nbytes = nbytes
        self._hand_over(slot, pieces)
        return slot.arrived

    def end(self) -> None:
        slot = self._next_slot()
        slot.frame.fit(0, _CPU, self._pinned)
        slot.frame.write(self._sent, None)
        self._hand_over(slot, [(slot.frame.whole[:_HEAD], TAG_FRAME)])

    def _next_slot(self) -> _Framed:
        """Return the next slot; with a correct window its last message arrived long ago."""
        slot = self._ring[0]
        self._wait(slot)
        # The receive of the next message was posted after the one in this slot had come.
        if not self.link.evaluates:
            self._capacity = max(self._capacity, slot.nbytes)
        return slot

    def _wait(self, slot: _Framed) -> None:
        if not slot.works:
            return
        with self._board.blocked(self._other, self.link.name), self.connection_guard:
            for work in slot.works:
                work.wait(_ENDLESS)
            if slot.body is not None:
                with self.stream.using():  # with NCCL, only the stream waits
                    slot.body.wait()
        slot.works, slot.body = [], None

    def _hand_over(self, slot: _Framed, pieces: list[tuple[Tensor, int]]) -> None:
        """Let gloo send tensors in CPU memory, with these tags."""
        self._sent += 1
        self._ring.rotate(-1)
        if self.link.staged:  # the rank waits for the copy to CPU memory
            self._thread.wait(slot.arrived)
            self._thread.reads(slot.buffer)
            slot.free = self._thread.mark()
        host, tags = self.link.host, self.link.tags
        with self.connection_guard:
            slot.works = [host.send([tensor], self._peer, tags + tag) for tensor, tag in pieces]

    def flush(self) -> None:
        for slot in self._ring:
            self._wait(slot)
