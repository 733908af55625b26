"""Takes the caller's batches, and sends their microbatches to the stages that need them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from operator import itemgetter
from typing import Any

from torch import Tensor

from spectrain_ext.errors import placed
from spectrain_ext.interrupts import waiting
from spectrain_ext.schedule import Replicas
from spectrain_ext.transport import (
    Buffer,
    Header,
    Message,
    Microbatches,
    Point,
    Sender,
    Stream,
    callers_stream,
)
from spectrain_ext.transport.message import NO_HEADER

from .batch import Microbatch, SplitDim, is_pair, microbatches_in, split

_logger = logging.getLogger(__name__)

_NONE = object()  # no batch is left
#: An input or a target, and where it goes.
_Sent = tuple[Sender, Message, Header]


@dataclass(frozen=True)
class BatchSettings:
    """The form of the caller's batches: dimensions of samples, and the count of a target."""

    split_dim: SplitDim  # the dimension of the samples
    count: Callable[[Any], float | Tensor] | None  # of a target: what its loss is divided by


class BatchSource:
    """Takes the caller's batches, splits them, and sends inputs and targets to their stages.

    Attributes:
        samples: how many this run has taken.
    """

    def __init__(
        self,
        inputs: Sequence[Sequence[Sender]],  # of each microbatch: to all ranks that share a replica
        targets: Sequence[Sequence[Sender]],
        replicas: Replicas,
        settings: BatchSettings,
        whole: bool,
        own_minibatches: bool,
    ) -> None:
        self._inputs, self._replicas, self._split_dim = inputs, replicas, settings.split_dim
        self._count = settings.count
        self._whole = whole  # each is a tuple of batches, which are not split
        # How many replicas train on a minibatch of their own.
        self._trained_apart = replicas.counts[0] if own_minibatches else 1
        self._edges = dict.fromkeys(edge for each in (*inputs, *targets) for edge in each)
        self._objects = all(edge.by_reference for edge in self._edges)
        self._batch = Buffer("the caller's batch")
        # By edge: the microbatches whose targets it carries. All targets of a minibatch go in one
        # message: with 16 microbatches over two processes that takes a tenth of the time.
        self._targets: dict[Sender, list[int]] = {}
        for n, edge in ((n, edge) for n, each in enumerate(targets) for edge in each):
            self._targets.setdefault(edge, []).append(n)
        self._left = False  # whether the caller has left the run
        self._batches: Iterator[object] = iter(())
        self._stop: Callable[[], None] | None = None  # tells stage 0 that no batch is left
        self.samples = 0

    def begin(self, batches: Iterator[object], stop: Callable[[], None]) -> None:
        self._batches, self._stop, self._left = batches, stop, False
        self.samples = 0

    def leave(self) -> None:
        """Take no further batch in this run."""
        self._left = True

    def pull(self, i: int, j: int) -> None:
        """Send the microbatches of the next batch, or end the run if there is none."""
        batch: object = _NONE
        if not self._left:
            with waiting():
                batch = next(self._batches, _NONE)
        if batch is _NONE:
            assert self._stop is not None
            self._stop()
            for edge in self._edges:
                edge.end()
            return
        parts = self._split(batch, i)
        count = len(parts)
        sizes = [part.samples for part in parts]
        self.samples += sum(sizes)
        shares = self._shares(sizes, batch)
        sent: list[_Sent] = []
        for part, share, edges in zip(parts, shares, self._inputs, strict=False):
            header = Header(count, share, part.samples)
            sent += [(edge, part.input, header) for edge in edges]
        for edge, numbers in self._targets.items():
            targets = [parts[n].target for n in numbers if n < count]
            if not self._whole and count > 1:
                targets = [joined_targets(targets)]
            sent += [(edge, target, NO_HEADER) for target in targets]
        send_batch(sent, self._batch)

    def _split(self, batch: object, i: int) -> list[Microbatch]:
        dims, objects = self._split_dim, self._objects
        if self._whole:
            assert isinstance(batch, tuple)
            numbered = enumerate(batch, i * len(batch))
            return [split(one, n, 1, dims, objects, False)[0] for n, one in numbered]
        microbatches = split(batch, i, len(self._inputs), dims, objects)
        for k, count in enumerate(self._replicas.counts):
            if len(microbatches) < count:
                raise ValueError(
                    f"batches[{i}]: it makes {len(microbatches)} microbatches, and stage {k} has "
                    f"{count} replicas, each of which needs one; leave such a minibatch out, or "
                    "make it larger"
                )
        return microbatches

    def _shares(self, sizes: Sequence[int], batch: Any) -> list[float]:
        """Return each microbatch's share of its update's samples, or 1 / ``count(target)``."""
        if self._count is not None and not self._whole:
            divisor = 0.0
            for one in microbatches_in(batch, "") or [batch]:
                target = one if isinstance(one, Mapping) else one[1]
                with placed("in count"):
                    count = float(self._count(target))
                    check_count(count, "what it returned")
                    divisor += count
            return [1.0 / divisor if divisor else 0.0] * len(sizes)
        if len(sizes) == 1:
            return [1.0]
        count = self._trained_apart
        totals = [sum(sizes[c::count]) for c in range(count)]
        shares = ((size, totals[j % count]) for j, size in enumerate(sizes))
        return [size / total if total else 1.0 for size, total in shares]


def joined_targets(messages: Sequence[Message]) -> Message:
    """Return the targets of a minibatch's microbatches as one message of ``Microbatches``."""
    tensors = tuple(chain.from_iterable(message.tensors for message in messages))
    forms = (message.form for message in messages)
    return Message(tensors, (False,) * len(tensors), ("microbatches", *forms))


def send_batch(sent: Sequence[_Sent], batch: Buffer) -> None:
    """Send inputs and targets of the caller's batch to their stages."""
    devices = {t.device for _, message, _ in sent for t in message.tensors if t is not None}
    # The CPU's work is done. Copies from there need no wait either: when the call returns it has
    # read pageable memory, and torch's allocator keeps pinned memory until it has been read.
    callers = {device: callers_stream(device) for device in devices}
    callers = {device: caller for device, caller in callers.items() if not caller.immediate}
    ready = {}
    for device, caller in callers.items():
        caller.writes(batch)
        ready[device] = caller.mark()
    read: dict[tuple[Stream, Sender], Point] = {}  # of the last message of an edge
    for edge, messages in groupby(sent, key=itemgetter(0)):
        with edge.stream:  # once for all
            for _, message, header in messages:
                if not ready:
                    edge.send(message, batch, header=header)
                    continue
                own = {t.device for t in message.tensors if t is not None} & ready.keys()
                source = batch if own else Buffer("no tensors")
                after = [ready[device] for device in own]
                point = edge.send(message, source, *after, header=header)
                read |= {(callers[device], edge): point for device in own}
    for (caller, _), point in read.items():
        caller.wait(point)


def without_dropped_columns(columns: Any, several: bool, batch: Any, i: int) -> Any:
    """Return a batch, or a tuple of batches, without the columns that are dropped."""
    if several:
        numbered = enumerate(batch, i * len(batch))
        return tuple(without_dropped_columns(columns, False, one, n) for n, one in numbered)
    if (cut := microbatches_in(batch, f"batches[{i}]")) is not None:
        return Microbatches(without_dropped_columns(columns, False, one, i) for one in cut)
    if isinstance(batch, Mapping):
        kept = columns.kept(batch, f"batches[{i}]")
        if i == 0 and (dropped := [name for name in batch if name not in kept]):
            _logger.info("columns that the model does not take are dropped: %s", dropped)
        return kept
    if is_pair(batch) and isinstance(batch[0], Mapping):
        return columns.kept(batch[0], f"batches[{i}][0]"), batch[1]
    return batch


def check_count(count: float, what: str) -> None:
    """Refuse what no sum of losses can be divided by; 0 is allowed, the mean of nothing."""
    if not 0 <= count < inf:
        raise ValueError(f"{what} is {count}: expected a number of samples, or a sum of weights")
