"""Defines a stage's edges, its position in the schedule, and the source of its minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Never

from torch import Tensor

from spectrain_ext.errors import placed
from spectrain_ext.interrupts import waiting
from spectrain_ext.schedule import Instruction, Kind, Replicas
from spectrain_ext.transport import Buffer, Header, Receiver, Sender

from .batch import (
    Microbatch,
    SplitDim,
    joined_targets,
    microbatches_in,
    send_batch,
    split,
)
from .tape import check_count


class Traffic(Enum):
    ACTIVATIONS = "activations"  # to the next stage
    GRADIENTS = "gradients"  # to the previous stage
    INPUTS = "inputs"  # of the caller's batches, to stage 0
    TARGETS = "targets"  # of the caller's batches, to the last stage
    TIED_WEIGHTS = "tied weights"  # to a stage that has copies of them
    TIED_GRADIENTS = "tied gradients"  # of tied weights, to the stage that owns them


TIED = (Traffic.TIED_WEIGHTS, Traffic.TIED_GRADIENTS)


@dataclass
class StageEdges:
    """The edges of one stage: for each kind, one per microbatch that this replica computes."""

    replica: int = 0  # index of this replica, of ``count``
    count: int = 1
    inputs: Sequence[Receiver] = ()  # the previous stage's ``to_next``
    targets: Sequence[Receiver] = ()  # on the last stage only
    gradients: Sequence[Receiver] = ()  # the next stage's ``to_previous``
    to_next: Sequence[Sender] = ()
    to_previous: Sequence[Sender] = ()

    def microbatches_of(self, header: Header) -> int:
        return len(range(self.replica, header.parts, self.count))

    def end(self) -> None:
        for edge in dict.fromkeys(self.to_next):
            edge.end()


def missing(what: str) -> Never:
    """Raise RuntimeError: the end of the run has come before a message."""
    raise RuntimeError(f"{what} is missing")


class Cursor:
    """The position of one stage in its schedule, limited to the instructions that the run contains.

    A stage learns of a minibatch, and of the end of the run, from the messages of its forwards.
    """

    def __init__(self, instructions: Iterator[Instruction], microbatches: int) -> None:
        self._instructions = instructions  # of the schedule; endless
        self._microbatches = microbatches  # of each minibatch in the schedule
        self._limited = False  # whether the run may lack some of the schedule's instructions
        self.upcoming = next(instructions, None)  # whether or not the run contains it
        self.minibatches: int | None = None  # the length of the run, once it is known
        self.added = 0
        self.updated = 0  # minibatches that the stage has updated from
        # By minibatch in flight: each microbatch's share of the samples, 0 before it has arrived.
        self.shares: dict[int, list[float]] = {}
        self.current: Instruction | None = None  # the one that is running
        self.step = 0  # at which of its steps it goes on
        self.finished = False  # whether the stage has nothing left to do

    def add(self, microbatches: int) -> None:
        """Add a minibatch; a small one has fewer microbatches than the schedule."""
        self.shares[self.added] = [0.0] * microbatches
        self.added += 1
        if microbatches < self._microbatches:
            self._limited = True

    def stop(self) -> None:
        """Note that no minibatches follow those added."""
        self.minibatches, self._limited = self.added, True

    def peek(self) -> Instruction | None:
        """Return the instruction that comes next, as far as is known now."""
        following = self.upcoming
        while following is not None:
            kind, i, j = following
            if (self.minibatches is None or i < self.minibatches) and (
                j == 0 or j < len(self.shares[i])
            ):
                break
            # Updates come in the order of minibatches: nothing follows one that the run lacks.
            following = None if kind is Kind.UPDATE else next(self._instructions, None)
            self.upcoming = following
        return following

    def take(self) -> Instruction | None:
        """Advance to the next instruction and return it; None: the stage has finished."""
        self.current, self.step = self.peek() if self._limited else self.upcoming, 0
        self.finished = self.current is None
        if not self.finished:
            self.upcoming = next(self._instructions, None)
        return self.current


_NONE = object()  # no batch is left


@dataclass(frozen=True)
class SourceSettings:
    split_dim: SplitDim  # the dimension of the samples
    count: Callable[[Any], float | Tensor] | None  # of a target: what its loss is divided by


class Source:
    """Takes the caller's batches, splits them, and sends inputs and targets to their stages."""

    def __init__(
        self,
        inputs: Sequence[Sequence[Sender]],  # of each microbatch: to all ranks that share a replica
        targets: Sequence[Sequence[Sender]],
        replicas: Replicas,
        settings: SourceSettings,
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

    def begin(self, batches: Iterator[object], stop: Callable[[], None]) -> None:
        self._batches, self._stop, self._left = batches, stop, False
        self.samples = 0  # of this run

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
            self._stop()
            for edge in self._edges:
                edge.end()
            return
        parts = self._split(batch, i)
        count = len(parts)
        sizes = [part.samples for part in parts]
        self.samples += sum(sizes)
        weights = self._weights(sizes, batch)
        for part, weight, edges in zip(parts, weights, self._inputs, strict=False):
            for edge in edges:
                send_batch(edge, part.input, self._batch, Header(count, weight, part.samples))
        for edge, numbers in self._targets.items():
            targets = [parts[n].target for n in numbers if n < count]
            if not self._whole and count > 1:
                targets = [joined_targets(targets)]
            for target in targets:
                send_batch(edge, target, self._batch)

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

    def _weights(self, sizes: Sequence[int], batch: Any) -> list[float]:
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
