"""Checks one stage's instructions one by one, and derives the weights that each reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from .generators import Generator, bounded, find_generator
from .instructions import Instruction, Kind, ScheduleError
from .place import Place
from .reading import Entries, Reader, Rules


@dataclass
class Count:
    """The counts of a stage's instructions.

    Attributes:
        updates: updates made.
        in_flight: the most microbatches at one time between the start of their forward and the end
            of their backward; the stage keeps the activations of each.
        versions: buffers of weights: those in use, those kept for later and, where weights are
            predicted, the true ones and those that predictions start from.
        delays: microbatches by the number of updates between the version that their forward read
            and their backward.

    Example:
        >>> from spectrain_ext.simulation import streams, validate
        >>> first, last = validate(streams("1f1b-async", [2, 1]), minibatches=10)
        >>> first.updates, first.in_flight, first.delays
        (10, 2, {0: 1, 1: 9})
    """

    updates: int = 0
    in_flight: int = 0
    versions: int = 1
    delays: dict[int, int] = field(default_factory=dict)


#: A version and how far it is predicted: a plain tuple, which the garbage collector stops tracking.
Pair = tuple[int, int]

_NEWEST = Rules()
_FORWARD, _BACKWARD, _UPDATE = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
_INPUT, _WEIGHTS = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS
_MISSING = (-1, -1)


class Ledger(Reader[Pair]):
    """Follows one stage's instructions, checks them, and returns the weights that each reads.

    Its memory does not grow with the length of the run.
    """

    def __init__(
        self,
        stage: int,
        rules: Rules = _NEWEST,
        *,
        window: int | None = None,  # the most microbatches in flight; None: any number
        microbatches: int | None = None,  # in every minibatch; None: any number
        entries: Entries | None = None,  # stage 0's versions, where the rules read these
        master: bool = False,  # whether the true weights have a wider dtype, and so a buffer
    ) -> None:
        super().__init__(rules, microbatches, entries)
        self._stage = stage
        self._master = master or rules.predicts
        # Parameters can point at it, unless it has another dtype.
        self._reads_master = self.retains and rules.predicts and not master
        self._besides = int(self._master) + int(rules.keeps_before)
        self.count = Count(versions=1 + self._besides)
        self._window = window
        self._microbatches = microbatches
        # The weights each microbatch read, None after its backward; removed by the update.
        self._forwards: dict[tuple[int, int], Pair | None] = {}
        self._halved: set[tuple[int, int]] = set()  # whose second half is missing
        self._in_flight_now = 0
        self._latest = 0  # the version that the last forward read; older ones are dropped
        self._copied = -1  # the newest version that an instruction has read

    def _weights(self, version: int, horizon: int = 0, by_step: bool = False) -> Pair:
        return version, horizon

    def enter(self, instruction: Instruction) -> Pair:
        """Return what the next instruction reads; for an update, what version it makes."""
        kind, i, j = instruction
        if kind is _FORWARD:
            return self._enter_forward(instruction)
        if kind is _UPDATE:
            self._check_update(instruction)
            self.updated()
            if self.written is not None:  # in addition to what backwards still need
                self._count_versions(self.written)
            self.count.updates = self.version
            return self.version, 0
        forward = self._forwards.get((i, j))
        if forward is None:
            raise self._unexpected(instruction)
        ends = self._check_half(instruction)
        if ends:
            self._forwards[i, j] = None
            self._in_flight_now -= 1
            delay = self.version - forward[0]
            self.count.delays[delay] = self.count.delays.get(delay, 0) + 1
        reading = self.for_backward(i, j, ends)
        # The step writes second-order predictions; backwards predict linearly.
        linear = self._by_step and not self._stashes
        self._count_versions((*reading, "linear") if linear else reading)
        return reading

    def _enter_forward(self, instruction: Instruction) -> Pair:
        _, i, j = instruction
        most = self._microbatches
        if i < self.version or (most is not None and j >= most) or (i, j) in self._forwards:
            raise self._unexpected(instruction)
        self._in_flight_now += 1
        if self._window is not None and self._in_flight_now > self._window:
            reason = f"the window allows {self._window} microbatches in flight, this is one more"
            raise ScheduleError(self._stage, instruction, reason)
        self.count.in_flight = max(self.count.in_flight, self._in_flight_now)
        reading = self.for_forward(i, j)
        version, now, latest = reading[0], self.version, self._latest
        if version > now:
            reason = f"reads version {version} after {now} updates: the window is too wide for that"
            raise ScheduleError(self._stage, instruction, reason)
        if version < latest:
            reason = f"reads version {version}, dropped when version {latest} was read"
            raise ScheduleError(self._stage, instruction, reason)
        self._latest = version
        self._forwards[i, j] = reading
        self._count_versions(reading)
        return reading

    def close(self, minibatches: int | None = None) -> Count:
        """End the stage's instructions and return their count."""
        for (i, j), reading in self._forwards.items():
            if reading is not None:
                raise ScheduleError(self._stage, self._rest(i, j), "missing at the end")
        for i, j in self._forwards:
            if i < self.version:
                reason = f"expected microbatch {j - 1} of the minibatch as well"
                raise ScheduleError(self._stage, Instruction(_FORWARD, i, j), reason)
        if self._forwards or (minibatches is not None and self.version < minibatches):
            due = Instruction(_UPDATE, self.version)
            raise ScheduleError(self._stage, due, "missing at the end")
        return self.count

    # Checks.

    def _unexpected(self, instruction: Instruction) -> ScheduleError:
        kind, i, j = instruction
        most = self._microbatches
        if kind is _FORWARD and most is not None and j >= most:
            reason = f"expected microbatches 0 to {most - 1} only"
        elif i < self.version:
            reason = "expected once, found again: the minibatch has had its update"
        elif kind is _FORWARD or (i, j) in self._forwards:
            reason = "expected once, found again"
        else:
            reason = "expected its forward before it"
        return ScheduleError(self._stage, instruction, reason)

    def _check_half(self, instruction: Instruction) -> bool:
        """Whether the backward ends here: a whole one, or the second half after the first."""
        kind, microbatch = instruction.kind, instruction[1:]
        halved = microbatch in self._halved
        if kind is _WEIGHTS and not halved:
            missing = Instruction(_INPUT, *microbatch)
            raise ScheduleError(self._stage, instruction, f"expected {missing} before it")
        if kind is not _WEIGHTS and halved:
            raise ScheduleError(
                self._stage, instruction, f"expected {self._rest(*microbatch)} instead"
            )
        if kind is _INPUT:
            self._halved.add(microbatch)
        elif kind is _WEIGHTS:
            self._halved.remove(microbatch)
        return kind is not _INPUT

    def _rest(self, i: int, j: int) -> Instruction:
        return Instruction(_WEIGHTS if (i, j) in self._halved else _BACKWARD, i, j)

    def _check_update(self, instruction: Instruction) -> None:
        _, i, _ = instruction
        if i != self.version:
            due = Instruction(_UPDATE, self.version)
            raise ScheduleError(self._stage, instruction, f"expected {due} first")
        forwards, expected = self._forwards, self._microbatches
        j = 0
        while j != expected:
            read = forwards.pop((i, j), _MISSING)
            if read is not None:
                if read is _MISSING and j and expected is None:
                    break
                needed = Instruction(_FORWARD, i, j) if read is _MISSING else self._rest(i, j)
                raise ScheduleError(self._stage, instruction, f"expected {needed} before it")
            j += 1

    def _count_versions(self, loaded: tuple[Any, ...]) -> None:
        """Count everything that exists while ``loaded`` is in use."""
        now = self.version, 0
        others: set[tuple[Any, ...]] = {loaded}
        if self.retains:
            others.update(weights for weights in self._newest if weights is not None)
        if not self._master:
            others.add(now)
        if self.written is not None:
            others.add(self.written)
        if not self._reads_newest:  # a later forward may read any of them
            if loaded == (self.version, self._past) and (self._past or not self._reads_master):
                self._copied = self.version
            end = max(self.version, self._copied + 1)
            others.update((version, self._past) for version in range(self._oldest, end))
        if self._reads_master:
            others.discard(now)
        exist = self._besides + len(self._wants) + sum(other not in self._wants for other in others)
        self.count.versions = max(self.count.versions, exist)


def count_stage(
    schedule: str | Generator, entry: Place, place: Place, rules: Rules, master: bool
) -> Count:
    """Return the count of the stage at ``place`` in a long run; ``entry`` is stage 0's place."""
    generate = find_generator(schedule)
    microbatches = place.microbatches
    entries = Entries(generate(entry))
    ledger = Ledger(place.stage, rules, microbatches=microbatches, entries=entries, master=master)
    # Two windows and six minibatches reach any schedule's steady state.
    enough = (entry.window + place.window) // microbatches + 6
    end = Instruction(_UPDATE, enough)
    for instruction in takewhile(end.__ne__, bounded(generate(place), place.stage)):
        ledger.enter(instruction)
    return ledger.count
