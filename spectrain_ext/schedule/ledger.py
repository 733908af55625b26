"""Ledger: one stage's turns entered one by one, checked, and what weights each computes with."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .actions import Action, Kind, ScheduleError


class Reading(NamedTuple):
    """The weights that a forward or a backward computes with.

    Where there are millions of them they are plain pairs.

    Attributes:
        version: updates of the stage that had been made to them.
        ahead: by how many updates they are predicted further; 0 for the version itself.
    """

    version: int
    ahead: int = 0


@dataclass(frozen=True)
class Rules:
    """The weights that a method has one stage compute with.

    Attributes:
        reads: the version that a forward reads. ``"newest"``: of the moment; ``"entry"``: that of
            stage 0 when the microbatch began there; ``"previous"``: of minibatch i, version i - 1.
        once: all microbatches of a minibatch have the forward weights of its first.
        ahead: updates by which the forward's weights are predicted further; ``"counted"``: to the
            version that its backward will meet.
        backward: ``"current"``: the version of the moment; ``"predict"``: that, predicted
            ``backward_ahead`` updates further; ``"stash"``: the forward's weights again.
        backward_ahead: see there.
        differences: the version before the newest is kept as well, for predictions from the
            difference of the two.
    """

    reads: Literal["newest", "entry", "previous"] = "newest"
    once: bool = False
    ahead: int | Literal["counted"] = 0
    backward: Literal["current", "predict", "stash"] = "current"
    backward_ahead: int = 0
    differences: bool = False


@dataclass
class Count:
    """What a stage's actions come to.

    Attributes:
        updates: their number.
        in_flight: the most microbatches that have begun their forward and not ended their backward
            at one time; of each the activations are kept.
        versions: the most weights that have to exist at one time: the true ones, those that are
            computed with, and those kept for later.
        delays: counted staleness, as {updates between the version that a microbatch's forward read
            and the one current at its backward: number of such microbatches}.
    """

    updates: int = 0
    in_flight: int = 0
    versions: int = 1
    delays: dict[int, int] = field(default_factory=dict)


Pair = tuple[int, int]  # a Reading; unlike it, the garbage collector does not look into it again

_NEWEST = Rules()
_FORWARD, _UPDATE = Kind.FORWARD, Kind.UPDATE
_MISSING = (-1, -1)

#: (minibatch, microbatch) -> the version that stage 0 had when it began its forward.
Entries = dict[tuple[int, int], int]


class Ledger:
    """Follows one stage's turns, checks them, and says what each computes with.

    The memory that it takes does not grow with the length of the run.

    Args:
        stage: its index k.
        stages: the number of stages.
        rules: which weights it computes with.
        window: the most microbatches in flight, None to allow any number.
        microbatches: the number that every minibatch must have; None: any, counted from 0.
        entries: shared by the ledgers of all stages; for ``reads="entry"``.

    Attributes:
        count: what it comes to so far.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        rules: Rules = _NEWEST,
        *,
        window: int | None = None,
        microbatches: int | None = None,
        entries: Entries | None = None,
    ) -> None:
        self.count = Count()
        self._stage = stage
        self._first, self._last = stage == 0, stage == stages - 1
        self._rules = rules
        # Two buffers at most, whatever the schedule: nothing is kept for later.
        self._keeps_none = (
            rules.reads == "newest"
            and rules.backward != "stash"
            and not rules.once
            and not rules.differences
        )
        self._ahead = rules.ahead if self._keeps_none and rules.ahead != "counted" else None
        self._backward_ahead = rules.backward_ahead if rules.backward == "predict" else 0
        if self._keeps_none and (self._ahead or self._backward_ahead):
            self.count.versions = 2
        self._window = window
        self._microbatches = microbatches
        self._entries = {} if entries is None else entries
        # What each microbatch read, None once it has had its backward; forgotten with the update.
        self._parts: dict[tuple[int, int], Pair | None] = {}
        self._flying = 0
        self._once: dict[int, Pair] = {}  # minibatch -> its forward weights, for ``once``
        self._oldest = 0  # the version that the last forward read: none before it exists
        self._kept: Counter[Pair] = Counter()

    def enter(self, run: Iterable[Action]) -> list[Pair]:
        """The next turns: what each computes with; for an update, the version that it makes.

        Raises:
            ScheduleError: a forward has been seen before, exceeds the window, or reads a version
                that does not exist yet or no longer; a backward has no forward before it, or has
                been seen before; an update is not the one that is due, or comes before a forward or
                a backward of its minibatch.
        """
        # A schedule has millions of turns: this loop is as plain as it can be.
        count, rules, parts = self.count, self._rules, self._parts
        delays = count.delays
        stashes, keeps_none = rules.backward == "stash", self._keeps_none
        ahead, backward_ahead = self._ahead, self._backward_ahead
        most = self._microbatches or sys.maxsize
        updates, peak, flying = count.updates, count.in_flight, self._flying
        readings: list[Pair] = []
        for turn in run:
            kind, i, j = turn
            if kind is _FORWARD:
                if i < updates or j >= most or (i, j) in parts:
                    raise self._unexpected_forward(turn)
                reading = self._read(turn) if ahead is None else (updates, ahead)
                parts[i, j] = reading
                flying += 1
                if flying > peak:
                    peak = count.in_flight = self._widened(turn, flying)
                if not keeps_none:
                    self._keep(turn, reading)
            elif kind is _UPDATE:
                self._check_update(turn)
                count.updates = updates = updates + 1
                reading = (updates, 0)
            else:
                read = parts.get((i, j))
                if read is None:
                    raise self._unexpected_backward(turn)
                parts[i, j] = None
                flying -= 1
                delay = updates - read[0]
                delays[delay] = delays.get(delay, 0) + 1
                reading = read if stashes else (updates, backward_ahead)
                if not keeps_none:
                    self._count_versions(reading)
                    if stashes:
                        self._drop(reading)
            readings.append(reading)
        self._flying = flying
        return readings

    def close(self, minibatches: int | None = None) -> Count:
        """The stage's actions have ended: what they come to.

        Raises:
            ScheduleError: a microbatch has no backward, a minibatch no update.
        """
        for (i, j), reading in self._parts.items():
            if reading is not None:
                raise ScheduleError(self._stage, Action(Kind.BACKWARD, i, j), "missing at the end")
        for i, j in self._parts:
            if i < self.count.updates:
                reason = f"expected microbatch {j - 1} of the minibatch as well"
                raise ScheduleError(self._stage, Action(_FORWARD, i, j), reason)
        if self._parts or (minibatches is not None and self.count.updates < minibatches):
            due = Action(_UPDATE, self.count.updates)
            raise ScheduleError(self._stage, due, "missing at the end")
        return self.count

    # Checks.

    def _again(self, i: int) -> str:
        done = i < self.count.updates
        return "expected once, found again" + (": the minibatch has had its update" if done else "")

    def _widened(self, turn: Action, flying: int) -> int:
        if self._window is not None and flying > self._window:
            reason = f"the window allows {self._window} microbatches in flight, this is one more"
            raise ScheduleError(self._stage, turn, reason)
        return flying

    def _unexpected_forward(self, turn: Action) -> ScheduleError:
        most = self._microbatches
        if most is not None and turn.microbatch >= most:
            reason = f"expected microbatches 0 to {most - 1} only"
            return ScheduleError(self._stage, turn, reason)
        return ScheduleError(self._stage, turn, self._again(turn.minibatch))

    def _unexpected_backward(self, turn: Action) -> ScheduleError:
        _, i, j = turn
        seen = i < self.count.updates or (i, j) in self._parts
        reason = self._again(i) if seen else "expected its forward before it"
        return ScheduleError(self._stage, turn, reason)

    def _check_update(self, turn: Action) -> None:
        _, i, _ = turn
        if i != self.count.updates:
            due = Action(_UPDATE, self.count.updates)
            raise ScheduleError(self._stage, turn, f"expected {due} first")
        parts, expected = self._parts, self._microbatches
        j = 0
        while j != expected:
            part = parts.pop((i, j), _MISSING)
            if part is not None:
                if part is _MISSING and j and expected is None:
                    break
                needed = Action(_FORWARD if part is _MISSING else Kind.BACKWARD, i, j)
                raise ScheduleError(self._stage, turn, f"expected {needed} before it")
            j += 1
        if self._once:
            self._release_first(i)

    # Weights.

    def _read(self, turn: Action) -> Pair:
        _, i, j = turn
        rules, now = self._rules, self.count.updates
        version = now
        if rules.reads == "previous":
            version = max(0, i - 1)
        elif rules.reads == "entry":
            if self._first:
                self._entries[i, j] = now
            version = self._entries.pop((i, j)) if self._last else self._entries[i, j]
        if rules.once and i in self._once:
            return self._once[i]
        if version > now:
            reason = f"reads version {version} after {now} updates: the window is too wide for that"
            raise ScheduleError(self._stage, turn, reason)
        if version < self._oldest:
            reason = f"reads version {version}, dropped when version {self._oldest} was read"
            raise ScheduleError(self._stage, turn, reason)
        self._oldest = version
        ahead = i - version if rules.ahead == "counted" else rules.ahead
        if ahead and self._keeps_none:
            self.count.versions = 2
        return version, ahead

    def _keep(self, turn: Action, reading: Pair) -> None:
        """Enter a forward's weights, and keep them for whoever reads them again."""
        i = turn.minibatch
        if self._rules.backward == "stash":
            self._kept[reading] += 1
        if self._rules.once and i not in self._once:
            self._once[i] = reading
            self._kept[reading] += 1
        self._count_versions(reading)
        if self._rules.once and turn.microbatch + 1 == self._microbatches:
            self._release_first(i)

    def _release_first(self, i: int) -> None:
        reading = self._once.pop(i, None)
        if reading is not None:
            self._drop(reading)

    def _drop(self, reading: Pair) -> None:
        self._kept[reading] -= 1
        if not self._kept[reading]:
            del self._kept[reading]

    def _count_versions(self, loaded: Pair) -> None:
        """Everything that exists while ``loaded`` is computed with."""
        now, kept = self.count.updates, self._kept
        others = [(now, 0)]
        if self._rules.reads != "newest":  # a later forward may read any of them
            others += [(version, 0) for version in range(self._oldest, now)]
        elif self._rules.differences and now:
            others.append((now - 1, 0))
        exist = len(kept) + (loaded not in kept)
        exist += sum(other != loaded and other not in kept for other in others)
        self.count.versions = max(self.count.versions, exist)
