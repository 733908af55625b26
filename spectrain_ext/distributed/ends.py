"""Inlet and Outlet: the receiver's and the sender's end of an edge between two processes.

A message is a frame in the host's memory, a header and as much of the body as the two ends have
agreed on: nothing at first. What does not fit follows apart, as does the layout when it is a new
one. Where no message is larger than the first, that one opens the edge: from then on a frame has
room for its body, and a message is one piece. Of NCCL bodies go by the device's own group.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.errors import OrderingError
from spectrain_ext.transport import (
    NO_HEADER,
    Buffer,
    Event,
    FlatMemory,
    Header,
    Layout,
    Message,
    Slot,
    Stream,
    callers_stream,
    new_stream,
)

from .board import Board
from .links import Link
from .wire import (
    DATA,
    END,
    ENDLESS,
    HEAD,
    HEADER,
    TAG_BODY,
    TAG_FRAME,
    TAG_LAYOUT,
    Frame,
    header_of,
    layout_of,
    numbers_of,
    text_of,
)

_CPU = torch.device("cpu")


class _End:
    """What both ends have: the link, a thread where there is something to wait for, its error.

    Attributes:
        capacity: how many bytes of a body are in a frame.
    """

    def __init__(
        self, link: Link, other: int, device: torch.device, board: Board, does: str
    ) -> None:
        self.link = link
        self.stream = new_stream(f"copy stream of {link.name}", device)
        self._thread = new_stream(f"{does} thread of {link.name}", _CPU)
        self._other, self._device, self._board = other, device, board
        self._peer = dist.get_group_rank(link.host, link.peer)
        # Whether the device's memory is where frames are.
        self._on_host = device.type == "cpu" and not link.staged
        self._pinned = link.staged and device.type == "cuda"
        self._capacity = 0
        self._error: BaseException | None = None

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """Have a thread do this; the rank's own hears of an error."""

        def guarded() -> None:
            try:
                with callers_stream(self._device).using():  # the thread's current one
                    work()
            except BaseException as error:
                with self._board.changed:
                    self._error = error
                    self._board.changed.notify_all()

        threading.Thread(target=guarded, name=f"spectrain {name}", daemon=True).start()

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until the thread has done something.

        Raises:
            RankError: a rank has failed, or the deadline has passed.
        """
        name = self.link.name
        self._board.wait(lambda: done() or self._error is not None, self._other, name)
        if done():
            return
        error = self._error
        assert error is not None
        if isinstance(error, OrderingError):
            raise error
        if isinstance(error, ValueError):
            raise ValueError(f"{name}: {error}") from error
        self._lost(error)

    def _lost(self, error: BaseException) -> NoReturn:
        self._board.lost(self._other, self.link.name, error)


class Arrived(Slot):
    """A receive buffer: ``frame`` is what gloo fills, by ``work`` if it has been given it."""

    layout: Layout
    nbytes: int

    def __init__(self, name: str, copy: Stream, receiver: Stream, on_host: bool) -> None:
        super().__init__(name, copy, receiver)
        self.frame = Frame()
        if on_host:
            self.memory = self.frame
        self.work: dist.Work | None = None


class Inlet(_End):
    """The receiver's end: a ring of buffers that messages are received into ahead of their use.

    gloo moves data beside the rank's own work by threads of its own, but a wait for it can be
    neither polled nor interrupted. So a thread waits here, and the rank's own waits for that
    thread, with a deadline and an ear for failures. Of a staged link that thread also copies what
    has arrived to the device, and waits for the copy: then gloo may have the CPU's memory again.

    Args:
        link: what the two processes share.
        device: where the tensors are wanted.
        receiver: the stream that uses what arrives.
        depth: messages that may be under way or in use at once.
        board: names a failure, and keeps deadlines.
    """

    blocks = True

    def __init__(
        self, link: Link, device: torch.device, receiver: Stream, depth: int, board: Board
    ) -> None:
        super().__init__(link, link.sender, device, board, "receiving")
        self._receiver = receiver
        self._landed = self._thread.event()
        self._free = deque(  # in the order in which messages will use them
            Arrived(f"{link.name}, slot {q}", self.stream, receiver, self._on_host)
            for q in range(depth)
        )
        self._layouts: list[Layout] = []
        self._heard = 0
        self._arrived: deque[Arrived | None] = deque()  # None: the end

    # The thread.

    def begin(self) -> None:
        """Listen for the messages of a run, to its end."""
        self._start(self.link.name, self._listen)

    def _listen(self) -> None:
        while True:
            slot = self._take()
            with self._board.changed:
                self._arrived.append(slot)
                self._board.changed.notify_all()
            if slot is None:
                return

    def _take(self) -> Arrived | None:
        """The next message, but for a body that the host does not receive."""
        slot = self._next_slot()
        sequence, kind, *label, number, length, nbytes = slot.frame.header.tolist()
        if sequence != self._heard or kind not in (DATA, END):
            raise ValueError(
                f"expected message {self._heard}, got one that says it is {sequence} of kind {kind}"
            )
        self._heard += 1
        if kind == END:
            self._recycle(slot)
            return None
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            self._receive(text, TAG_LAYOUT).wait(ENDLESS)
            self._layouts.append(layout_of(text.numpy().tobytes()))
        layout = self._layouts[number]
        if layout.places()[1] > nbytes:
            raise ValueError(f"the peer announced {layout} and sends {nbytes} bytes")
        slot.header, slot.layout, slot.nbytes = header_of(*label), layout, nbytes
        if self.link.by_host:
            if nbytes > self._capacity:
                slot.frame.fit(nbytes, pinned=self._pinned)
                self._receive(slot.frame.bytes[:nbytes], TAG_BODY).wait(ENDLESS)
                if not self.link.dynamic:
                    self._open(nbytes)
            if self.link.staged:
                self._load(slot)
        return slot

    def _open(self, capacity: int) -> None:
        with self._board.changed:
            self._capacity = capacity
            for slot in self._free:
                self._post(slot)

    def _load(self, slot: Arrived) -> None:
        """Copy what has landed to the device, and wait for that."""
        copy, nbytes = self.stream, slot.nbytes
        self._thread.writes(slot.staged)
        self._thread.record(self._landed)
        copy.wait(self._landed)
        copy.wait(slot.free)
        with copy.using(reads=(slot.staged,), writes=(slot.buffer,)):
            slot.memory.fit(nbytes, self._device)
            slot.memory.bytes[:nbytes].copy_(slot.frame.bytes[:nbytes], non_blocking=True)
        copy.record(slot.arrived)
        self._thread.wait(slot.arrived)

    def _next_slot(self) -> Arrived:
        """The next buffer, with what has been received into its frame."""
        with self._board.changed:
            self._board.changed.wait_for(lambda: len(self._free) > 0)
            slot = self._free.popleft()
        if slot.work is None:
            self._post(slot)
        assert slot.work is not None
        slot.work.wait(ENDLESS)
        slot.work = None
        return slot

    def _recycle(self, slot: Arrived) -> None:
        with self._board.changed:
            if self._capacity:
                self._post(slot)
            self._free.append(slot)
            self._board.changed.notify_all()

    def _post(self, slot: Arrived) -> None:
        slot.frame.fit(self._capacity, pinned=self._pinned)
        slot.work = self._receive(slot.frame.whole[: HEAD + self._capacity], TAG_FRAME)

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        # Not dist.irecv: its checks take half as long as the call itself.
        return self.link.host.recv([tensor], self._peer, self.link.tags + tag)

    # The rank's own thread.

    def has(self, i: int = 0, j: int = 0) -> bool:
        """Whether the next message, or the end, has arrived."""
        return bool(self._arrived)

    def receive(self) -> Arrived | None:
        self._wait_for(self.has)
        slot = self._arrived.popleft()
        if slot is None:
            return None
        copy = self.stream
        if not self.link.staged:
            copy.wait(slot.free)
            with copy.using(writes=(slot.buffer,)):  # be it by gloo
                if not self.link.by_host:
                    self._receive_on_device(slot)
            copy.record(slot.arrived)
        self._receiver.wait(slot.arrived)
        slot.message = slot.layout.message(slot.memory.views(slot.layout))
        return slot

    def _receive_on_device(self, slot: Arrived) -> None:
        slot.memory.fit(slot.nbytes, self._device)
        if not slot.nbytes:
            return
        try:
            into, group = slot.memory.bytes[: slot.nbytes], self.link.device
            work = dist.irecv(into, self.link.peer, group=group, tag=TAG_BODY)
            assert work is not None
            work.wait()  # the stream does
        except RuntimeError as error:
            self._lost(error)

    def free(self, slot: Slot) -> None:
        assert isinstance(slot, Arrived)
        self._receiver.record(slot.free)
        slot.message = None
        try:
            self._recycle(slot)
        except RuntimeError as error:  # gloo takes no buffers for a broken connection
            self._lost(error)

    def reset(self) -> None:
        """After a failure: messages may still come, but nobody will ask for them."""

    def free_storage(self) -> None:
        """Nothing: the buffers have been lent to gloo for the next messages, until it ends."""


_Pieces = list[tuple[Tensor, int]]  # what the host sends, with their tags


class _Outgoing:
    """A message on its way: packed in ``memory`` of the device, and ``read`` from the source."""

    def __init__(self, name: str, memory: FlatMemory | None, copy: Stream, thread: Stream) -> None:
        self.buffer = Buffer(name)
        self.frame = Frame()
        self.memory = self.frame if memory is None else memory
        self.read = copy.event()
        self.sent = thread.event()
        self.handed = True  # to gloo
        self.works: list[dist.Work] = []
        self.body: dist.Work | None = None


class _Kind(NamedTuple):
    """What messages that look the same have in common."""

    layout: Layout
    number: int
    nbytes: int


class Outlet(_End):
    """The sender's end: packs the tensors of a message and sends them in one piece.

    A layout (number of tensors, shapes, strides, dtypes, which want a gradient) is announced once,
    and later messages must not be larger than the first, unless shapes are dynamic.

    Of a staged link the packed message is copied to the CPU's memory, and a thread waits for that
    copy and sends it: the rank's own does not wait for the device.

    Args:
        link: what the two processes share.
        device: where the tensors are.
        depth: messages that may be under way at once.
        board: names a failure.
    """

    def __init__(self, link: Link, device: torch.device, depth: int, board: Board) -> None:
        super().__init__(link, link.receiver, device, board, "sending")
        self.target = device
        packed = FlatMemory()  # of the message that is being staged
        self._ring = []
        for q in range(depth):
            memory = packed if link.staged else None if self._on_host else FlatMemory()
            name = f"{link.name}, slot {q}"
            self._ring.append(_Outgoing(name, memory, self.stream, self._thread))
        self._jobs: SimpleQueue[tuple[_Outgoing, _Pieces, bool]] | None = None
        self._sent = 0
        self._kinds: dict[object, _Kind] = {}
        self._first: Layout | None = None

    def send(
        self, message: Message, source: Buffer, *ready: Event, header: Header = NO_HEADER
    ) -> Event:
        (layout, number, nbytes), text = self._kind_of(message)
        link, copy, slot = self.link, self.stream, self._slot()
        for event in ready:
            copy.wait(event)
        with copy.using(reads=(source,)):
            slot.memory.fit(nbytes, self._device)
            for to, tensor in zip(slot.memory.views(layout), message.tensors, strict=True):
                if to is not None and tensor is not None:
                    to.copy_(tensor, non_blocking=True)
        slot.frame.fit(nbytes if link.by_host else 0, pinned=self._pinned)
        if link.staged:
            copy.wait(slot.sent)
            with copy.using(writes=(slot.buffer,)):
                slot.frame.bytes[:nbytes].copy_(slot.memory.bytes[:nbytes], non_blocking=True)
        copy.record(slot.read)
        slot.frame.header[:] = (self._sent, DATA, *numbers_of(header), number, len(text), nbytes)
        self._sent += 1
        pieces = [(slot.frame.whole[: HEAD + self._capacity], TAG_FRAME)]
        if text:
            pieces.append((torch.frombuffer(bytearray(text), dtype=torch.uint8), TAG_LAYOUT))
        if link.by_host and nbytes > self._capacity:
            pieces.append((slot.frame.bytes[:nbytes], TAG_BODY))
            if not link.dynamic:
                self._capacity = nbytes
        self._hand_over(slot, pieces)
        if nbytes and not link.by_host:
            with copy.using():
                self._send_on_device(slot, slot.memory.bytes[:nbytes])
        return slot.read

    def _kind_of(self, message: Message) -> tuple[_Kind, bytes]:
        """What the message is like, and what has to be announced of it.

        To see that it is like one before takes a third of the time of describing it anew.
        """
        tensors, *form = message
        likeness = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]
        looks = (*likeness, *form)
        kind = self._kinds.get(looks)
        if kind is not None:
            return kind, b""
        layout = Layout.of(message)
        nbytes = self._checked_bytes(layout)
        kind = self._kinds[looks] = _Kind(layout, len(self._kinds), nbytes)
        return kind, text_of(layout)

    def _checked_bytes(self, layout: Layout) -> int:
        """The bytes of the body: always those of the first message, or those of this one."""
        if self.link.dynamic:
            return layout.places()[1]
        if self._first is None:
            self._first = layout
        if not self._first.shrinks_to(layout):
            raise ValueError(
                f"{self.link.name} was opened for {self._first}, and a later message has {layout}; "
                "with dynamic_shapes=False every message must have the first one's tensors, "
                "smaller at most in one dimension each"
            )
        return self._first.places()[1]

    def end(self) -> None:
        slot = self._slot()
        slot.frame.fit(self._capacity, pinned=self._pinned)
        slot.frame.header[:] = (self._sent, END, *[0] * (HEADER - 2))
        self._sent += 1
        frame = slot.frame.whole[: HEAD + self._capacity]
        self._hand_over(slot, [(frame, TAG_FRAME)], last=True)

    def _slot(self) -> _Outgoing:
        """The next slot; what was sent from it has long arrived, or the window is wrong."""
        slot = self._ring[self._sent % len(self._ring)]
        self._wait(slot)
        return slot

    def _wait(self, slot: _Outgoing) -> None:
        if not slot.handed:
            self._wait_for(lambda: slot.handed)
        if not slot.works:
            return
        with self._board.blocked(self._other, self.link.name):
            try:
                for work in slot.works:
                    work.wait(ENDLESS)
                if slot.body is not None:
                    with self.stream.using():  # of NCCL, only the stream waits
                        slot.body.wait()
            except RuntimeError as error:
                self._lost(error)
        slot.works, slot.body = [], None

    def _hand_over(self, slot: _Outgoing, pieces: _Pieces, last: bool = False) -> None:
        """Have gloo send these, of a staged link by the thread; last: of the run."""
        if not self.link.staged:
            try:
                for tensor, tag in pieces:
                    slot.works.append(self._send(tensor, tag))
            except RuntimeError as error:
                self._lost(error)
            return
        slot.handed = False
        if self._jobs is None:
            self._jobs = SimpleQueue()
            self._start(f"staging of {self.link.name}", partial(self._send_staged, self._jobs))
        self._jobs.put((slot, pieces, last))
        if last:
            self._jobs = None

    def _send_staged(self, jobs: SimpleQueue[tuple[_Outgoing, _Pieces, bool]]) -> None:
        """What the thread does until the run ends: send what has been copied, in order."""
        last = False
        while not last:
            slot, pieces, last = jobs.get()
            self._thread.wait(slot.read)
            self._thread.reads(slot.buffer)
            self._thread.record(slot.sent)
            works = [self._send(tensor, tag) for tensor, tag in pieces]
            with self._board.changed:
                slot.works, slot.handed = works, True
                self._board.changed.notify_all()

    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        # Not dist.isend: its checks, after a backward that has emptied the caches, take longer
        # than the call itself.
        return self.link.host.send([tensor], self._peer, self.link.tags + tag)

    def _send_on_device(self, slot: _Outgoing, tensor: Tensor) -> None:
        try:
            slot.body = dist.isend(tensor, self.link.peer, group=self.link.device, tag=TAG_BODY)
        except RuntimeError as error:
            self._lost(error)

    def flush(self) -> None:
        for slot in self._ring:
            self._wait(slot)
