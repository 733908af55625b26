"""Simulates ranks whose stages have replicas and which share cores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from spectrain_ext.schedule import Instruction, Kind, Replicas, ScheduleError, bounded, receive

from .timing import LOADS, SENDS, Durations, Span, takes_of

_NEVER = float("inf")
_Message = tuple[int, bool, int, int]  # receiving rank, whether forward, minibatch, microbatch


def simulate_ranks(
    actions: Sequence[Iterable[Instruction]],
    durations: Durations,
    replicas: Replicas,
    *,
    minibatches: int,
    cores: int | None = None,
) -> Iterator[Span]:
    """Yield the spans of every rank's actions, in the order of their ends; ``stage`` is the rank.

    Differences from ``simulate``: replica j mod r of a stage runs microbatch j of a minibatch; an
    update begins when all replicas of the stage have ended the minibatch; with ``cores`` all ranks
    share that many. While more ranks than cores compute, each gets an equal share (processor
    sharing, which a scheduler of processes approximates over some milliseconds). Sends need no
    core. Versions are not tracked.

    Args:
        actions: per rank, in the replica's own microbatches, as for ``simulate``.
        durations: of every stage.
        replicas: of every stage.
        minibatches: the length of the run.
        cores: None: one per rank.

    Raises:
        ScheduleError: the schedule cannot run.
        ValueError: ``durations`` or ``actions`` are for another number of stages or ranks, or there
            is less than one core.

    Example:
        >>> from spectrain_ext.schedule import Replicas
        >>> from spectrain_ext.tools.simulation import Durations, simulate_ranks, streams
        >>> actions = streams("1f1b-async", [2, 1])
        >>> two = simulate_ranks(actions, Durations.of(2), Replicas([1, 1]), minibatches=4, cores=1)
        >>> max(span.end for span in two)
        16.0
    """
    for name, number, wanted in (
        ("actions", len(actions), replicas.ranks),
        ("durations", len(durations.forward), replicas.stages),
    ):
        if number != wanted:
            raise ValueError(f"{name}: expected {wanted}, got {number}")
    if cores is not None and cores < 1:
        raise ValueError(f"cores: expected at least 1, got {cores}")
    return _Machine(actions, durations, replicas, minibatches, cores or replicas.ranks).run()


class _Machine:
    """Advances all ranks and their cores from one event to the next."""

    def __init__(
        self,
        actions: Sequence[Iterable[Instruction]],
        durations: Durations,
        replicas: Replicas,
        minibatches: int,
        cores: int,
    ) -> None:
        self._durations, self._replicas, self._cores = durations, replicas, cores
        self._now = self._served = 0.0  # the time, and every computing rank's share of it so far
        self._order = count()  # of events at the same time
        self._running: list[tuple[float, int, int]] = []  # computing ranks, by share at the end
        self._wakes: list[tuple[float, int, int]] = []  # waiting ranks, by when their input arrives
        self._begun = [0.0] * replicas.ranks
        self._pending: list[Instruction | None] = [None] * replicas.ranks
        self._ended: dict[tuple[int, int], list[int]] = {}  # ranks that wait for a stage's update
        self._sent: dict[_Message, float] = {}  # or when it arrives, if wires are not inbound
        self._awaited: set[_Message] = set()
        self._wire = [0.0] * replicas.ranks  # when each rank's inbound wire is free
        self._spans: list[Span] = []
        self._ranks = [
            self._rank(rank, bounded(run, replicas.stage_and_replica(rank)[0], minibatches))
            for rank, run in enumerate(actions)
        ]

    def run(self) -> Iterator[Span]:
        for instructions in self._ranks:
            next(instructions, None)
        while self._running or self._wakes:
            rate = min(1.0, self._cores / max(1, len(self._running)))
            end = wake = _NEVER
            if self._running:
                end = self._now + (self._running[0][0] - self._served) / rate
            if self._wakes:
                wake = self._wakes[0][0]
            if end <= wake:
                self._now = end
                self._served, _, rank = heappop(self._running)
            else:
                self._served += (wake - self._now) * rate
                self._now, _, rank = heappop(self._wakes)
            next(self._ranks[rank], None)
            yield from self._spans
            self._spans.clear()
        for rank, instruction in enumerate(self._pending):
            if instruction is not None:
                stage, _ = self._replicas.stage_and_replica(rank)
                raise ScheduleError(stage, receive(instruction), "never arrives: no rank can go on")

    def _rank(self, rank: int, instructions: Iterator[Instruction]) -> Iterator[None]:
        """Run a rank's instructions; yield while it computes or waits."""
        stage, replica = self._replicas.stage_and_replica(rank)
        counts, d = self._replicas.counts, self._durations
        takes = takes_of(d, stage)
        edge = {True: d.activation[stage], False: d.gradient[stage]}
        free = {True: 0.0, False: 0.0}  # when its edges to the next and the previous stage are free
        for instruction in instructions:
            self._pending[rank] = instruction
            kind, i, j = instruction
            load, compute = takes[kind]
            forward, microbatch = kind is Kind.FORWARD, replica + j * counts[stage]
            if kind is Kind.UPDATE:
                together = self._ended.setdefault((stage, i), [])
                together.append(rank)
                if len(together) == counts[stage]:
                    for member in self._ended.pop((stage, i)):
                        self._compute(member, compute)
            else:
                self._compute(rank, load)
                yield
                if self._begun[rank] < self._now:
                    self._note(rank, instruction._replace(kind=LOADS[kind]))
                self._receive(rank, stage, (rank, forward, i, microbatch), kind)
                yield
                self._compute(rank, compute)
            yield
            self._note(rank, instruction)
            to = stage + (1 if forward else -1)
            if kind in SENDS and 0 <= to < len(counts):
                end = self._now
                if not d.inbound:
                    start = max(self._now, free[forward])
                    free[forward] = end = start + edge[forward]
                    self._spans.append(Span(rank, *SENDS[kind], i, j, start, end, None))
                self._send((self._replicas.runs(to, microbatch), forward, i, microbatch), end)
        self._pending[rank] = None

    def _compute(self, rank: int, duration: float) -> None:
        self._begun[rank] = self._now
        heappush(self._running, (self._served + duration, next(self._order), rank))

    def _note(self, rank: int, instruction: Instruction) -> None:
        self._spans.append(Span(rank, "compute", *instruction, self._begun[rank], self._now, None))

    def _receive(self, rank: int, stage: int, message: _Message, kind: Kind) -> None:
        source = 0 if kind is Kind.FORWARD else self._replicas.stages - 1
        if stage == source or kind not in SENDS:
            self._wake(rank, self._now)
        elif message in self._sent:
            self._wake(rank, max(self._now, self._arrival(message, self._sent.pop(message))))
        else:
            self._awaited.add(message)

    def _send(self, message: _Message, at: float) -> None:
        if message in self._awaited:
            self._awaited.remove(message)
            self._wake(message[0], self._arrival(message, at))
        else:
            self._sent[message] = at

    def _arrival(self, message: _Message, sent: float) -> float:
        """Return when a message that was sent and asked for arrives."""
        rank, forward, i, microbatch = message
        d = self._durations
        if not d.inbound:
            return sent
        stage, _ = self._replicas.stage_and_replica(rank)
        sender = stage - 1 if forward else stage + 1
        start = max(sent, self._wire[rank])
        self._wire[rank] = end = start + (d.activation if forward else d.gradient)[sender]
        who, j = (
            self._replicas.runs(sender, microbatch),
            microbatch // self._replicas.counts[sender],
        )
        kind = Kind.FORWARD if forward else Kind.BACKWARD
        self._spans.append(Span(who, *SENDS[kind], i, j, start, end, None))
        return end

    def _wake(self, rank: int, at: float) -> None:
        heappush(self._wakes, (at, next(self._order), rank))
