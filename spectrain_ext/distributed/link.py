"""Link: what the two ends of an edge between processes have in common."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from .fingerprint import Fingerprint
from .layout import Layout

# A header, as int64: sequence number, its kind, parts of the minibatch, the bits of a float64 that
# travels along, the two of the batch's fingerprint, number of the layout, its bytes as text (0 if
# it has been announced), bytes of the body.
HEADER = 9
# Bytes before a body that travels in one piece with its header: whole alignment units.
HEAD = 256
DATA, END = 1, 2
# The same two ranks use the same group: what a message is for.
TAG_HEADER, TAG_LAYOUT, TAG_BODY = 1, 2, 3
# gloo cannot be interrupted, and a wait that times out breaks its connection: the threads that
# wait are ended with the process, and deadlines are the board's.
ENDLESS = timedelta(days=365)


class Link(NamedTuple):
    """What two processes have in common for one direction.

    Attributes:
        name: of the edge, for reports.
        sender: the sending rank, within the pipeline.
        receiver: the receiving one.
        peer: the other process's rank in the default group.
        host: a gloo group of the two.
        device: the group that bodies go by: the same, or one of NCCL.
        dynamic: whether later messages may be larger than the first.
        staged: whether the stages are on devices that gloo cannot reach: bodies are copied to the
            CPU's memory before they are sent, and from there where they arrive.
    """

    name: str
    sender: int
    receiver: int
    peer: int
    host: dist.ProcessGroup
    device: dist.ProcessGroup
    dynamic: bool
    staged: bool = False

    @property
    def by_host(self) -> bool:
        """Whether bodies travel in the CPU's memory."""
        return self.device is self.host

    @property
    def framed(self) -> bool:
        """Whether, once the edge is open, a header and its body are one piece of a known size.

        That halves the calls and the waits of a message.
        """
        return self.by_host and not self.dynamic


class Header(NamedTuple):
    """What precedes a message.

    Attributes:
        parts: microbatches of its minibatch.
        value: a number that travels along.
        batch: what minibatch it is of; not with gradients.
        end: there is no message: the run has no more of them.
    """

    parts: int
    value: float = 0.0
    batch: Fingerprint = Fingerprint()
    end: bool = False


class FlatMemory:
    """A flat piece of memory for a message, and the tensors of the layout that it last had.

    Attributes:
        frame: all of it: room for a header, then the body.
        bytes: the body.
        header: the header's numbers; only where the memory is the CPU's.
    """

    header: NDArray[np.int64]

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Have no memory."""
        self.frame = self.bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._views: list[Tensor | None] = []

    def fit(self, nbytes: int, device: torch.device, pinned: bool = False) -> None:
        """Have a body of at least so many bytes; pinned: that a GPU copies beside the host."""
        if self.frame.numel() < HEAD + nbytes or self.frame.device != device:
            self.frame = torch.empty(
                HEAD + nbytes, dtype=torch.uint8, device=device, pin_memory=pinned
            )
            self.bytes = self.frame[HEAD:]
            self._layout = None
            if device.type == "cpu":
                self.header = self.frame[: 8 * HEADER].view(torch.int64).numpy()

    def views(self, layout: Layout) -> list[Tensor | None]:
        """The tensors of a layout in the body."""
        if self._layout != layout:
            self._layout, self._views = layout, layout.views(self.bytes)
        return self._views
