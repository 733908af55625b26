"""Delays messages between processes of this machine as the slow-link benchmark's meter does.

Protocol NanoGPT (github.com/PluralisResearch/ProtocolNanoGPT) gives every rank one inbound wire for
activations and gradients together. A message arrives at

    max(arrival of the one before, sent) + bytes/bandwidth + latency

in the order in which the rank asks for them, and the rank sleeps until then. Messages really go
over gloo, by the pipeline's own code or by torch.distributed.pipelining's: only the moments are
later. A sleeping rank needs no core, so more ranks than cores can wait at once; what they compute
still shares the cores.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from spectrain_ext.distributed.ends import RemoteReceiver, RemoteSender
from spectrain_ext.pipeline.processes import Traffic

_COUNTED = (Traffic.ACTIVATIONS, Traffic.GRADIENTS)
_MOMENTS = 4096  # of a pair of ranks: more than the messages that can be under way


class InboundWires:
    """The inbound wire of one rank.

    Args:
        path: the file from ``make``.
        rank, ranks: this process, and how many there are.
        bandwidth: bytes per second.
        latency: seconds of a message.

    Attributes:
        bytes, messages: arrived so far.
        waited: seconds of sleep so far.
    """

    def __init__(self, path: Path, rank: int, ranks: int, bandwidth: float, latency: float) -> None:
        self.rank, self._ranks = rank, ranks
        self._bandwidth, self._latency = bandwidth, latency
        with path.open("r+b") as file:
            # The moments when messages were sent: all processes of a machine have one clock.
            self._moments = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        self._free = 0.0  # when the wire is
        self.bytes = self.messages = 0
        self.waited = 0.0

    @staticmethod
    def make(folder: Path, ranks: int) -> Path:
        """Make the file that all ranks share."""
        path = folder / "moments"
        path.write_bytes(bytes(8 * _MOMENTS * ranks * ranks))
        return path

    def arrival(self, sent: float, size: int) -> float:
        """Return the moment when the next message that the rank asks for arrives."""
        self._free = max(self._free, sent) + size / self._bandwidth + self._latency
        return self._free

    def stamp(self, receiver: int) -> None:
        """Note that a message to this rank is ready."""
        place = self._place(self._sent, self.rank, receiver)
        self._moments[place] = monotonic()

    def wait(self, sender: int, size: int) -> None:
        """Sleep until the next message of this rank, which gloo has delivered, arrives."""
        place = self._place(self._received, sender, self.rank)
        began = monotonic()
        remaining = self.arrival(self._moments[place], size) - began
        if remaining > 0.0:
            sleep(remaining)
        self.waited += monotonic() - began
        self.bytes += size
        self.messages += 1

    def _place(self, counter: Counter[tuple[int, int]], sender: int, receiver: int) -> int:
        number = counter[sender, receiver]
        counter[sender, receiver] += 1
        return _MOMENTS * (sender * self._ranks + receiver) + number % _MOMENTS

    @contextmanager
    def between_ranks(self) -> Iterator[None]:
        """Inside, messages of ``DistributedPipeline`` come over the wire."""
        plain_send, plain_receive = RemoteSender.send, RemoteReceiver.receive

        def send(end: RemoteSender, *arguments: Any, **named: Any) -> Any:
            if end.link.what in _COUNTED:
                self.stamp(end.link.receiver)
            return plain_send(end, *arguments, **named)

        def receive(end: RemoteReceiver) -> Any:
            slot = plain_receive(end)
            if slot is not None and end.link.what in _COUNTED:
                size = sum(t.nbytes for t in slot.message.tensors if t is not None)
                self.wait(end.link.sender, size)
            return slot

        receiving = patch.object(RemoteReceiver, "receive", receive)
        with patch.object(RemoteSender, "send", send), receiving:
            yield

    @contextmanager
    def between_stages_of_torch(self) -> Iterator[None]:
        """Inside, messages of ``torch.distributed.pipelining`` come over the wire."""

        def batch(operations: Sequence[dist.P2POp], desc: str | None = None) -> list[Any]:
            works: list[Any] = []
            for each in operations:
                sends = each.op is dist.isend
                if sends:
                    self.stamp(each.peer)
                peer = "group_dst" if sends else "group_src"
                named = {peer: each.group_peer}
                work = each.op(each.tensor, group=each.group, tag=each.tag, **named)
                works.append(work if sends else _Arrival(self, work, each))
            return works

        with patch.object(schedules, "_batch_p2p", batch):
            yield


class _Arrival:
    """A receive of torch's that ends when its message has come over the wire."""

    def __init__(self, wires: InboundWires, work: Any, operation: dist.P2POp) -> None:
        self._wires, self._work, self._operation = wires, work, operation

    def wait(self) -> None:
        self._work.wait()
        tensor = self._operation.tensor
        self._wires.wait(self._operation.peer, tensor.nbytes)
