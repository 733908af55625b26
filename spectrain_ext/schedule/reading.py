"""Defines a stage's rules, and derives the weights that each forward and backward reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import exp
from sys import maxsize
from typing import Any, Generic, Literal, TypeVar

from .instructions import Instruction, Kind

Reads = Literal["newest", "entry", "previous"]
Law = Literal["linear", "geometric", "second-order", "difference", "average"]
#: A law of your own: a function of the horizon.
OwnLaw = Callable[[int], Any]
Backward = Literal["current", "predict", "stash"]


@dataclass(frozen=True)
class Rules:
    """The weights that one stage computes with: a ``Method`` at one place.

    Attributes:
        forward_reads: the version that a forward reads. ``"newest"``: the current one; ``"entry"``:
            stage 0's when the microbatch began there; ``"previous"``: i - 1 for minibatch i.
        law: the prediction law. The step writes ``"second-order"`` predictions, which cannot be
            made again; ``"difference"`` needs the version before the newest, ``"average"`` an
            average of changes. Any other is a function of the horizon.
        forward_horizon: updates by which the forward's weights are predicted ahead; ``"counted"``:
            up to the version that is current at its backward.
        lead: further updates of the second-order law.
        backward: ``"current"``: the newest version; ``"predict"``: that version predicted
            ``backward_horizon`` updates ahead; ``"stash"``: the forward's weights.
        backward_horizon: see ``backward``.
        once: all microbatches of a minibatch use the first one's forward weights.
        correction: replaces a step's coefficients, see ``Method``.

    Example:
        >>> from spectrain_ext.schedule import Rules
        >>> from spectrain_ext.simulation import streams, validate
        >>> rules = [Rules(backward="stash")] * 3
        >>> counts = validate(streams("1f1b-async", [3, 2, 1]), minibatches=20, rules=rules)
        >>> [count.versions for count in counts]
        [3, 2, 1]
    """

    forward_reads: Reads = "newest"
    law: Law | OwnLaw = "linear"
    forward_horizon: int | Literal["counted"] = 0
    lead: int = 0
    backward: Backward = "current"
    backward_horizon: int = 0
    once: bool = False
    correction: Any = None

    @property
    def predicts(self) -> bool:
        """Whether any weights are predicted; the true ones then have a buffer of their own."""
        return self.forward_horizon != 0 or self.lead != 0 or self.backward_horizon > 0

    @property
    def by_step(self) -> bool:
        """Whether a step writes the forwards' predictions, which cannot be made again."""
        return self.law == "second-order" and (self.forward_horizon != 0 or self.lead != 0)

    def retains(self, microbatches: int | None) -> bool:
        """Whether a backward and its forward read different weights, each in its own buffer."""
        older = self.forward_reads != "newest" or self.once
        if self.backward == "stash" or not (self.predicts or older):
            return False
        # They share one buffer, written before each use, where that is as fast: an update comes
        # between any two forwards, and the weights of both forward and backward are predicted.
        return not (
            microbatches == 1
            and self.backward == "predict"
            and self.backward_horizon > 0
            and self.forward_reads == "newest"
            and self.law != "second-order"
        )

    @property
    def keeps_before(self) -> bool:
        """Whether the version before the newest, or an average of changes, has a buffer."""
        return self.law in ("difference", "average") and self.predicts

    @property
    def averaging(self) -> float:
        """The share of itself that this average keeps in an update; 0: the version before."""
        return exp(-2.0 / self.backward_horizon) if self.law == "average" and self.predicts else 0.0


class Entries:
    """The version that stage 0 has when each microbatch enters, for one stage's forwards."""

    def __init__(self, instructions: Iterable[Instruction] = ()) -> None:
        self._versions = _versions_at_forwards(instructions)  # lazily
        self._next: tuple[int, int, int] | None = None
        self.following = 0  # the version of the forward after the one that was taken

    def take(self, i: int, j: int) -> int:
        """Return the version of a microbatch; small minibatches skip some of the schedule's."""
        entry = self._next or next(self._versions)
        while entry[:2] != (i, j):
            entry = next(self._versions)
        self._next = next(self._versions, None)
        self.following = (self._next or entry)[2]
        return entry[2]


def _versions_at_forwards(instructions: Iterable[Instruction]) -> Iterator[tuple[int, int, int]]:
    """Yield the minibatch, the microbatch and the number of updates before each forward."""
    updates = 0
    for kind, i, j in instructions:
        if kind is Kind.FORWARD:
            yield i, j, updates
        updates += kind is Kind.UPDATE


#: A key for weights: the version and how it is predicted, false if it is not.
W = TypeVar("W", bound=tuple[Any, ...])


class Reader(ABC, Generic[W]):
    """Applies ``Rules`` for a ``Ledger`` and the engine: what to compute with, what to keep."""

    def __init__(
        self, rules: Rules, microbatches: int | None = None, entries: Entries | None = None
    ) -> None:
        self.rules = rules
        self.version = 0  # updates made in this run
        # Whether the newest version keeps the weights of its last forward and backward.
        self.retains = rules.retains(microbatches)
        # The step's own prediction, which cannot be made again, while forwards may read it.
        self.written: W | None = None
        # -1: any number of microbatches.
        self._last = -1 if microbatches is None else microbatches - 1
        self._entries = Entries() if entries is None else entries
        self._reads_newest = rules.forward_reads == "newest"
        ahead = rules.forward_horizon
        self._horizon = None if ahead == "counted" else ahead + rules.lead
        self._past = 0 if self._reads_newest else self._horizon or 0  # the same, for older versions
        self._by_step = rules.by_step
        self._stashes = rules.backward == "stash"
        self._backward_horizon = rules.backward_horizon if rules.backward == "predict" else 0
        self._in_flight: dict[tuple[int, int], W] = {}  # weights for their backwards
        self._wants: Counter[W] = Counter()
        self._first: tuple[int, W] | None = None  # minibatch and its weights, with ``once``
        self._oldest = maxsize if self._reads_newest else 0  # version a later forward may read
        self._newest: list[W | None] = [None, None]  # of a forward, of a backward

    @abstractmethod
    def _weights(self, version: int, horizon: int = 0, by_step: bool = False) -> W:
        """Return the key of a version, predicted so far ahead, by the step or by an operator."""

    def for_forward(self, i: int, j: int) -> W:
        if self.rules.once:
            weights = self._for_minibatch(i, j)
        elif self._reads_newest:
            weights = self.written or self._ahead(self.version, i)
        else:
            weights = self._weights(self._read_older(i, j), self._past)
        if self._stashes:
            self._in_flight[i, j] = weights
            self.hold(weights)
        if weights[0] == self.version:
            self._newest[0] = weights
        return weights

    def _ahead(self, version: int, i: int) -> W:
        """Return the weights of a forward of minibatch i that reads this version as the newest."""
        if self._horizon is None:
            return self._weights(version, i - version)
        if self._by_step and version == 0:
            return self._weights(0)  # no step has written a prediction yet
        return self._weights(version, self._horizon, self._by_step)

    def _for_minibatch(self, i: int, j: int) -> W:
        """Return the first microbatch's weights, kept until the last one's forward."""
        if self._first is None or self._first[0] != i:
            if self._first is not None:  # a small minibatch had no last microbatch
                self.release(self._first[1])
            self._first = i, self.written or self._ahead(self.version, i)
            self.hold(self._first[1])
        weights = self._first[1]
        if j == self._last:
            self.release(weights)
            self._first = None
        return weights

    def _read_older(self, i: int, j: int) -> int:
        """Return the version that a forward reads, and drop older ones."""
        if self.rules.forward_reads == "entry":
            version = self._entries.take(i, j)
            self._oldest = self._entries.following
        else:
            version = max(0, i - 1)
            self._oldest = max(0, i - (j != self._last))
        return version

    def for_backward(self, i: int, j: int, ends: bool = True) -> W:
        """Return the weights of a backward; ``ends`` is False for the first of two halves."""
        if j == self._last and ends:
            self.written = None  # an update comes before the next forward
        if self._stashes:
            if not ends:
                return self._in_flight[i, j]
            weights = self._in_flight.pop((i, j))
            self.release(weights)
            return weights
        self._newest[1] = weights = self._weights(self.version, self._backward_horizon)
        return weights

    def hold(self, weights: W) -> None:
        """Keep weights for one more use, until they are released."""
        self._wants[weights] += 1

    def release(self, weights: W) -> None:
        self._wants[weights] -= 1
        if not self._wants[weights]:
            del self._wants[weights]

    def updated(self) -> None:
        """Advance the version at an update and drop what only the last version needed."""
        self._newest = [None, None]
        self.version += 1
        if self._by_step and self._horizon is not None:
            self.written = self._weights(self.version, self._horizon, True)

    def _is_wanted(self, weights: W) -> bool:
        """Whether a later instruction computes with weights that cannot be made again."""
        return (
            weights in self._wants
            or (self.retains and weights in self._newest)
            or weights == self.written
            or (weights[0] >= self._oldest and weights == self._weights(weights[0], self._past))
        )
