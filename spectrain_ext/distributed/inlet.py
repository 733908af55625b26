"""Inlet: the receiver's end of an edge between two processes."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.errors import OrderingError
from spectrain_ext.transport.local import Header, Slot
from spectrain_ext.transport.streams import Buffer, Stream, callers_stream, new_stream

from .board import Board
from .links import Link
from .wire import (
    DATA,
    END,
    ENDLESS,
    HEAD,
    HEADER,
    TAG_BODY,
    TAG_HEADER,
    TAG_LAYOUT,
    FlatMemory,
    Layout,
    header_of,
)

_CPU = torch.device("cpu")


class Arrived(Slot):
    """A receive buffer: a message in one flat piece of memory.

    Attributes:
        memory: of the message.
        landing: what gloo fills: the same, of a staged link memory of the CPU.
        landed: the landing as a buffer that streams use, and the event that it has been filled.
        work: gloo's, if it has been given the landing.
    """

    def __init__(self, name: str, copy: Stream, receiver: Stream, thread: Stream | None) -> None:
        super().__init__(name, copy, receiver)
        self.memory = self.landing = FlatMemory()
        if thread is not None:
            self.landing = FlatMemory()
            self.landed = Buffer(f"{name}, landing"), thread.event()
        self.work: dist.Work | None = None


class _Next(NamedTuple):
    header: Header | None  # None: the end
    layout: Layout | None = None
    nbytes: int = 0
    slot: Arrived | None = None


class Inlet:
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
        self.link = link
        self.stream = new_stream(f"copy stream of {link.name}", device)
        self._device = device
        self._peer = dist.get_group_rank(link.host, link.peer)
        self._receiver = receiver
        self._board = board
        self._thread = new_stream(f"receiving thread of {link.name}", _CPU)
        thread = self._thread if link.staged else None
        self._free = deque(  # in the order in which messages will use them
            Arrived(f"{link.name}, slot {q}", self.stream, receiver, thread) for q in range(depth)
        )
        self._layouts: list[Layout] = []
        self._capacity: int | None = None  # of every body, once that is known
        self._heard = 0
        self._arrived: deque[_Next] = deque()
        self._error: BaseException | None = None

    # The thread.

    def begin(self) -> None:
        """Listen for the messages of a run, to its end."""
        threading.Thread(
            target=self._listen, name=f"spectrain {self.link.name}", daemon=True
        ).start()

    def _listen(self) -> None:
        try:
            with callers_stream(self._device).using():  # the device is the thread's current one
                while True:
                    item = self._take()
                    with self._board.changed:
                        self._arrived.append(item)
                        self._board.changed.notify_all()
                    if item.header is None:
                        return
        except BaseException as error:
            with self._board.changed:
                self._error = error
                self._board.changed.notify_all()

    def _take(self) -> _Next:
        """The next header, and its body if the host receives it."""
        slot = None
        if self._capacity is None:
            alone = torch.empty(HEADER, dtype=torch.int64)
            self._fill(alone, TAG_HEADER)
            fields = alone.tolist()
        else:
            slot = self._next_slot()
            fields = slot.landing.header.tolist()
        sequence, kind, *label, number, length, nbytes = fields
        if sequence != self._heard or kind not in (DATA, END):
            raise ValueError(
                f"expected message {self._heard}, got one that says it is {sequence} of kind {kind}"
            )
        self._heard += 1
        if kind == END:
            if slot is not None:
                self._recycle(slot)
            return _Next(None)
        header = header_of(*label)
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            self._fill(text, TAG_LAYOUT)
            self._layouts.append(Layout.from_bytes(bytes(text.tolist())))
        layout = self._layouts[number]
        if layout.places()[1] > nbytes:
            raise ValueError(f"the peer announced {layout} and sends {nbytes} bytes")
        if not self.link.by_host:  # the rank's own thread issues device work
            return _Next(header, layout, nbytes)
        if slot is None:
            if self.link.framed:
                with self._board.changed:
                    self._capacity = nbytes
                    for free in self._free:
                        self._post(free, nbytes)
            slot = self._next_slot(nbytes)
        if self.link.staged:
            self._load(slot, nbytes)
        return _Next(header, layout, nbytes, slot)

    def _load(self, slot: Arrived, nbytes: int) -> None:
        """Copy what has landed to the device, and wait for that."""
        (landing, filled), copy = slot.landed, self.stream
        self._thread.writes(landing)
        self._thread.record(filled)
        copy.wait(filled)
        copy.wait(slot.free)
        with copy.using(reads=(landing,), writes=(slot.buffer,)):
            slot.memory.fit(nbytes, self._device)
            slot.memory.bytes[:nbytes].copy_(slot.landing.bytes[:nbytes], non_blocking=True)
        copy.record(slot.arrived)
        self._thread.wait(slot.arrived)

    def _next_slot(self, nbytes: int = 0) -> Arrived:
        """The next buffer, with what has been received into it."""
        with self._board.changed:
            self._board.changed.wait_for(lambda: len(self._free) > 0)
            slot = self._free.popleft()
        if slot.work is None:
            self._post(slot, nbytes)
        if slot.work is not None:
            slot.work.wait(ENDLESS)
            slot.work = None
        return slot

    def _recycle(self, slot: Arrived) -> None:
        with self._board.changed:
            if self._capacity is not None:
                self._post(slot, self._capacity)
            self._free.append(slot)
            self._board.changed.notify_all()

    def _fill(self, tensor: Tensor, tag: int) -> None:
        self._receive(tensor, tag).wait(ENDLESS)

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        # Not dist.irecv: its checks take half as long as the call itself.
        return self.link.host.recv([tensor], self._peer, self.link.tags + tag)

    def _post(self, slot: Arrived, nbytes: int) -> None:
        pinned = self.link.staged and self._device.type == "cuda"
        slot.landing.fit(nbytes, _CPU, pinned)
        if self.link.framed:
            into = slot.landing.frame[: HEAD + nbytes]
        elif nbytes:
            into = slot.landing.bytes[:nbytes]
        else:
            return
        slot.work = self._receive(into, TAG_BODY)

    # The rank's own thread.

    def has(self, i: int = 0, j: int = 0) -> bool:
        """Whether the next message, or the end, has arrived."""
        return bool(self._arrived)

    def _wait(self) -> None:
        """Wait for the next message, or the end.

        Raises:
            RankError: a rank has failed, or the deadline has passed.
        """
        self._board.wait(self._ready, self.link.sender, self.link.name)
        if not self._arrived:
            error = self._error
            assert error is not None
            if isinstance(error, OrderingError):
                raise error
            if isinstance(error, ValueError):
                raise ValueError(f"{self.link.name}: {error}") from error
            self._board.lost(self.link.sender, self.link.name, error)

    def _ready(self) -> bool:
        return bool(self._arrived) or self._error is not None

    def receive(self) -> Arrived | None:
        self._wait()
        header, layout, nbytes, slot = self._arrived.popleft()
        if header is None:
            return None
        assert layout is not None
        copy = self.stream
        if slot is None:
            slot = self._free.popleft()
            copy.wait(slot.free)
            with copy.using(writes=(slot.buffer,)):
                slot.memory.fit(nbytes, self._device)
                if nbytes:
                    self._receive_on_device(slot.memory.bytes[:nbytes])
        elif not self.link.staged:
            copy.wait(slot.free)
            copy.writes(slot.buffer)  # by gloo
        if not self.link.staged:
            copy.record(slot.arrived)
        self._receiver.wait(slot.arrived)
        slot.message, slot.header = layout.message(slot.memory.views(layout)), header
        return slot

    def _receive_on_device(self, into: Tensor) -> None:
        try:
            work = dist.irecv(into, self.link.peer, group=self.link.device, tag=TAG_BODY)
            assert work is not None
            work.wait()  # the stream does
        except RuntimeError as error:
            self._board.lost(self.link.sender, self.link.name, error)

    def free(self, slot: Slot) -> None:
        assert isinstance(slot, Arrived)
        self._receiver.record(slot.free)
        slot.message = None
        try:
            self._recycle(slot)
        except RuntimeError as error:  # gloo takes no buffers for a broken connection
            self._board.lost(self.link.sender, self.link.name, error)

    def reset(self) -> None:
        """After a failure: messages may still come, but nobody will ask for them."""

    def free_storage(self) -> None:
        """Nothing: the buffers have been lent to gloo for the next messages, until it ends."""
