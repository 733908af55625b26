"""Outlet: the sender's end of an edge between two processes."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain_ext.errors import OrderingError
from spectrain_ext.transport.local import NO_HEADER, Header, Message
from spectrain_ext.transport.streams import Buffer, Event, Stream, callers_stream, new_stream

from .board import Board
from .links import Link
from .wire import (
    DATA,
    END,
    ENDLESS,
    HEADER,
    TAG_BODY,
    TAG_HEADER,
    TAG_LAYOUT,
    FlatMemory,
    Layout,
    numbers_of,
)

_CPU = torch.device("cpu")


_Pieces = list[tuple[Tensor, int]]  # what the host sends, with their tags


class _Outgoing(FlatMemory):
    def __init__(self, name: str, copy: Stream, host: Stream) -> None:
        super().__init__()
        self.buffer = Buffer(name)
        self.read = copy.event()
        self.sent = host.event()
        self.handed = True  # to gloo
        self.works: list[dist.Work] = []
        self.body: dist.Work | None = None
        self.lent: list[Tensor] = []  # what is being sent beside the memory


class _Kind(NamedTuple):
    """What one kind of message has in common."""

    looks: object
    layout: Layout
    number: int
    nbytes: int


class Outlet:
    """The sender's end: packs the tensors of a message and sends them in one piece.

    The first message opens the edge: its layout (number of tensors, shapes, strides, dtypes, which
    want a gradient) is announced, and later ones must not be larger, unless shapes are dynamic.

    Of a staged link the packed message is copied to the CPU's memory, and a thread waits for that
    copy and sends it: the rank's own does not wait for the device.

    Args:
        link: what the two processes share.
        device: where the tensors are.
        depth: messages that may be under way at once.
        board: names a failure.

    Attributes:
        target: where messages are packed, the device.
    """

    def __init__(self, link: Link, device: torch.device, depth: int, board: Board) -> None:
        self.link = link
        self.stream = new_stream(f"copy stream of {link.name}", device)
        self.target = device
        self._board = board
        self._thread = new_stream(f"sending thread of {link.name}", _CPU)
        self._ring = [
            _Outgoing(f"{link.name}, slot {q}", self.stream, self._thread) for q in range(depth)
        ]
        self._packed = FlatMemory()  # on the device, of the message that is being staged
        self._pinned = link.staged and device.type == "cuda"
        self._jobs: SimpleQueue[tuple[_Outgoing, _Pieces, bool]] | None = None
        self._error: BaseException | None = None
        self._peer = dist.get_group_rank(link.host, link.peer)
        self._sent = 0
        self._known: dict[Layout, int] = {}
        self._last: _Kind | None = None
        self._first: Layout | None = None
        self._capacity = 0

    def send(
        self, message: Message, source: Buffer, *ready: Event, header: Header = NO_HEADER
    ) -> Event:
        opens = self._first is None
        kind, text = self._kind_of(message)
        _, layout, number, nbytes = kind
        slot = self._slot()
        copy = self.stream
        for event in ready:
            copy.wait(event)
        packed = self._packed if self.link.staged else slot
        with copy.using(reads=(source,)):
            packed.fit(nbytes, self.target)
            for to, tensor in zip(packed.views(layout), message.tensors, strict=True):
                if to is not None and tensor is not None:
                    to.copy_(tensor, non_blocking=True)
        if self.link.staged:
            copy.wait(slot.sent)
            with copy.using(writes=(slot.buffer,)):
                slot.fit(nbytes, _CPU, self._pinned)
                slot.bytes[:nbytes].copy_(packed.bytes[:nbytes], non_blocking=True)
        copy.record(slot.read)
        fields = (self._sent, DATA, *numbers_of(header), number, len(text), nbytes)
        self._sent += 1
        pieces: _Pieces = []
        if opens or not self.link.framed:
            pieces.append((torch.tensor(fields), TAG_HEADER))
        if self.link.framed:
            slot.header[:] = fields
            pieces.append((slot.frame, TAG_BODY))
        if text:
            pieces.append((torch.frombuffer(bytearray(text), dtype=torch.uint8), TAG_LAYOUT))
        if nbytes and self.link.by_host and not self.link.framed:
            pieces.append((slot.bytes[:nbytes], TAG_BODY))
        self._hand_over(slot, pieces)
        if nbytes and not self.link.by_host:
            with copy.using():
                self._send_on_device(slot, slot.bytes[:nbytes])
        return slot.read

    def _kind_of(self, message: Message) -> tuple[_Kind, bytes]:
        """What the message is like, and what has to be announced of it.

        A message is nearly always like the last one; to see that takes a third of the time that it
        takes to describe it anew.
        """
        looks = (
            [None if t is None else (t.shape, t.stride(), t.dtype) for t in message.tensors],
            message.differentiable,
            message.single,
            message.keys,
        )
        if self._last is not None and self._last.looks == looks:
            return self._last, b""
        layout = Layout.of(message)
        nbytes = self._checked_bytes(layout)
        text = b""
        number = self._known.get(layout)
        if number is None:
            number = self._known[layout] = len(self._known)
            text = layout.to_bytes()
        self._last = _Kind(looks, layout, number, nbytes)
        return self._last, text

    def _checked_bytes(self, layout: Layout) -> int:
        """The bytes of the body: always those of the first message, or those of this one."""
        _, nbytes = layout.places()
        if self.link.dynamic:
            return nbytes
        if self._first is None:
            self._first, self._capacity = layout, nbytes
        if layout not in self._known and not self._first.shrinks_to(layout):
            raise ValueError(
                f"{self.link.name} was opened for {self._first}, and a later message has {layout}; "
                "with dynamic_shapes=False every message must have the first one's tensors, "
                "smaller at most in one dimension each"
            )
        return self._capacity

    def end(self) -> None:
        slot = self._slot()
        header = (self._sent, END, *[0] * (HEADER - 2))
        self._sent += 1
        if self.link.framed and self._first is not None:
            slot.fit(self._capacity, _CPU, self._pinned)
            slot.header[:] = header
            self._hand_over(slot, [(slot.frame, TAG_BODY)], last=True)
        else:
            self._hand_over(slot, [(torch.tensor(header), TAG_HEADER)], last=True)

    def _slot(self) -> _Outgoing:
        """The next slot; what was sent from it has long arrived, or the window is wrong."""
        slot = self._ring[self._sent % len(self._ring)]
        self._wait(slot)
        return slot

    def _wait(self, slot: _Outgoing) -> None:
        if self.link.staged:
            self._board.wait(
                lambda: slot.handed or self._error is not None, self.link.receiver, self.link.name
            )
            if isinstance(self._error, OrderingError):
                raise self._error
            if self._error is not None:
                self._board.lost(self.link.receiver, self.link.name, self._error)
        if not slot.works:
            return
        with self._board.blocked(self.link.receiver, self.link.name):
            try:
                for work in slot.works:
                    work.wait(ENDLESS)
                if slot.body is not None:
                    with self.stream.using():  # of NCCL, only the stream waits
                        slot.body.wait()
            except RuntimeError as error:
                self._board.lost(self.link.receiver, self.link.name, error)
        slot.works.clear()
        slot.lent.clear()
        slot.body = None

    def _hand_over(self, slot: _Outgoing, pieces: _Pieces, last: bool = False) -> None:
        """Have gloo send these, of a staged link by the thread; last: of the run."""
        slot.lent += [tensor for tensor, _ in pieces]
        if not self.link.staged:
            try:
                for tensor, tag in pieces:
                    slot.works.append(self._send(tensor, tag))
            except RuntimeError as error:
                self._board.lost(self.link.receiver, self.link.name, error)
            return
        slot.handed = False
        if self._jobs is None:
            self._jobs = SimpleQueue()
            name = f"spectrain staging of {self.link.name}"
            threading.Thread(
                target=self._send_staged, args=(self._jobs,), name=name, daemon=True
            ).start()
        self._jobs.put((slot, pieces, last))
        if last:
            self._jobs = None

    def _send_staged(self, jobs: SimpleQueue[tuple[_Outgoing, _Pieces, bool]]) -> None:
        """What the thread does until the run ends: send what has been copied, in order."""
        last = False
        try:
            with callers_stream(self.target).using():  # the device is the thread's current one
                while not last:
                    slot, pieces, last = jobs.get()
                    self._thread.wait(slot.read)
                    self._thread.reads(slot.buffer)
                    self._thread.record(slot.sent)
                    works = [self._send(tensor, tag) for tensor, tag in pieces]
                    with self._board.changed:
                        slot.works, slot.handed = works, True
                        self._board.changed.notify_all()
        except BaseException as error:
            with self._board.changed:
                self._error = error
                self._board.changed.notify_all()

    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        # Not dist.isend: its checks, after a backward that has emptied the caches, take longer
        # than the call itself.
        return self.link.host.send([tensor], self._peer, self.link.tags + tag)

    def _send_on_device(self, slot: _Outgoing, tensor: Tensor) -> None:
        try:
            slot.body = dist.isend(tensor, self.link.peer, group=self.link.device, tag=TAG_BODY)
        except RuntimeError as error:
            self._board.lost(self.link.receiver, self.link.name, error)

    def flush(self) -> None:
        for slot in self._ring:
            self._wait(slot)
