"""Trace: records when every action of a run really ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from spectrain_ext.pipeline.loads import Handler
from spectrain_ext.pipeline.observer import Observer
from spectrain_ext.schedule import (
    Entries,
    Instruction,
    Kind,
    Lane,
    Ledger,
    Rules,
    Span,
    open_ledgers,
)

from .marks import WORK, Mark, Record, marked

if TYPE_CHECKING:
    from spectrain_ext.pipeline.stage import Stage

_TURNS = frozenset(
    (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS, Kind.UPDATE)
)


@dataclass
class _Phase:
    """A part of a run, in which all minibatches are trained on by the same rules.

    Attributes:
        rules: of all stages.
        before: minibatches of the run before it.
        records: in which minibatches are counted from there.
        entry: of each stage that has weights what makes the actions of stage 0.
    """

    rules: Sequence[Rules]
    before: int = 0
    records: list[Record] = field(default_factory=list)
    entry: dict[int, Callable[[], Iterator[Instruction]] | None] = field(default_factory=dict)

    def ledgers(self) -> list[Ledger]:
        """Of all stages; where stage 0 is in another process, its schedule tells its versions."""
        ledgers = open_ledgers(len(self.rules), self.rules)
        if 0 not in self.entry:
            for k, entry in self.entry.items():
                ledgers[k] = Ledger(k)
                if entry is not None:
                    ledgers[k] = Ledger(k, self.rules[k], entries=Entries(entry()))
        return ledgers


class Trace(Observer):
    """Give one to ``Pipeline.run`` and look at its ``spans`` afterwards.

    On the CPU an action's time is the host's, from its call to its return; stages there run in
    turn. On CUDA it is the device's, between two events on the stream that the action is issued to,
    without what it waits for of its own stage. Marking costs the host some microseconds per action.
    Loads, forwards, losses, backwards, updates and sends are recorded; pulling a batch and
    receiving are not.

    A trace holds the last run that it was given to, in memory that grows with the run's length.
    """

    ranges = True

    def __init__(self) -> None:
        self._phases: list[_Phase] = []
        self._wall = 0.0  # what a clock on the wall is ahead of the marks
        self._origins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}

    def begin(self, rules: Sequence[Rules], devices: Sequence[torch.device]) -> None:
        """Forget what was recorded; a run begins.

        Args:
            rules: which weights every stage computes with.
            devices: of every stage; CUDA devices are synchronized once, to compare their clocks.
        """
        self._phases = [_Phase(rules)]
        self._wall = time.time() - time.perf_counter()
        self._origins.clear()
        for device in devices:
            if device.type == "cuda" and device not in self._origins:
                torch.cuda.synchronize(device)
                event = torch.cuda.Event(enable_timing=True)
                event.record(torch.cuda.current_stream(device))
                self._origins[device] = time.perf_counter(), event

    def changed(self, rules: Sequence[Rules], minibatches: int) -> None:
        self._phases.append(_Phase(rules, minibatches))

    def watch(self, stage: Stage, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        phase = self._phases[-1]
        phase.entry[stage.index] = None if stage.weights is None else stage.weights.entry
        return marked(stage, handlers, phase.records)

    def spans(self) -> list[Span]:
        """What was recorded, each stage's in order, in seconds from the first action's start.

        Waits for CUDA devices. After a run that failed: what ended before.
        """
        found: list[Span] = []
        lane_ends: dict[tuple[int, Lane], float] = {}
        first = self._first()
        records = (
            (phase, ledgers, *record)
            for phase, ledgers in [(phase, phase.ledgers()) for phase in self._phases]
            for record in phase.records
        )
        for phase, ledgers, k, kind, i, j, start, end in records:
            lane = WORK[kind][0]
            turn = ledgers[k].enter([Instruction(kind, i, j)]) if kind in _TURNS else [(None, 0)]
            action = Instruction(kind, phase.before + i, j)
            # An event on an idle stream happens at once, although what comes after it has to wait
            # for the stage's computation.
            free = max(lane_ends.get((k, lane), 0.0), lane_ends.get((k, "compute"), 0.0))
            begun = max(self._seconds(start) - first, free)
            ended = max(self._seconds(end) - first, begun)
            lane_ends[k, lane] = ended
            version, horizon = turn[0]
            if version is not None:
                version += phase.before
            found.append(Span(k, lane, *action, begun, ended, version, horizon))
        return found

    @property
    def origin(self) -> float:
        """When the first action started, in seconds since 1970, for ``write_trace``."""
        return self._wall + self._first()

    def _first(self) -> float:
        starts = (start for phase in self._phases for *_, start, _ in phase.records)
        return min(map(self._seconds, starts), default=0.0)

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        at, origin = self._origins[mark.device]
        mark.synchronize()
        return at + float(origin.elapsed_time(mark)) / 1000.0
