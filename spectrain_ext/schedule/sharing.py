"""Sharing: when the actions of ranks run, where stages have replicas and ranks share cores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from .instructions import Instruction, Kind, ScheduleError
from .interleaving import bounded
from .place import Replicas
from .simulation import LOADS, Durations, Span

_FORWARD, _UPDATE, _WEIGHTS = Kind.FORWARD, Kind.UPDATE, Kind.BACKWARD_WEIGHTS
_NEVER = float("inf")
_Key = tuple[bool, int, int]  # whether it is an activation; minibatch, microbatch


def simulate_ranks(
    actions: Sequence[Iterable[Instruction]],
    durations: Durations,
    replicas: Replicas,
    *,
    minibatches: int,
    cores: int | None = None,
) -> Iterator[Span]:
    """The spans of every rank's actions, in the order of their ends; ``stage`` in them is the rank.

    As ``simulate``, and besides: microbatch j of a minibatch is run by replica j mod r of a stage,
    an update begins when all replicas of the stage have ended the minibatch, and with ``cores``
    all ranks compute on so many. As long as more ranks than that have something to compute, each
    gets an equal share of the cores (processor sharing: a scheduler of processes comes to that over
    some milliseconds). Sends take no share. Versions are not followed.

    Args:
        actions: of every rank, in the replica's own microbatches, as for ``simulate``.
        durations: of every stage.
        replicas: of every stage.
        minibatches: the length of the run.
        cores: None: every rank has its own.

    Raises:
        ScheduleError: the schedule cannot be run.
        ValueError: ``durations`` or ``actions`` for another number of stages or ranks, or less than
            one core.
    """
    for name, found, wanted in (
        ("actions", len(actions), replicas.ranks),
        ("durations", len(durations.forward), replicas.stages),
    ):
        if found != wanted:
            raise ValueError(f"{name}: expected {wanted}, got {found}")
    if cores is not None and cores < 1:
        raise ValueError(f"cores: expected at least 1, got {cores}")
    seats = [replicas.seat(rank) for rank in range(replicas.ranks)]
    ranks = [
        _Rank(bounded(actions[rank], k, minibatches), k, c, replicas.counts[k])
        for rank, (k, c) in enumerate(seats)
    ]
    return _Machine(ranks, durations, replicas, cores or replicas.ranks).run()


class _Rank:
    """What a rank is about to do, and what it was sent."""

    def __init__(self, turns: Iterator[Instruction], stage: int, replica: int, count: int) -> None:
        self.turns = turns
        self.stage = stage
        self._replica, self._count = replica, count
        self.turn: Instruction | None = None
        self.begun = 0.0
        self.loading = False
        self.waits: _Key | None = None
        self.arrived: dict[_Key, float] = {}
        self.free = {True: 0.0, False: 0.0}  # its edges: to the next, to the previous

    def of_minibatch(self, turn: Instruction) -> _Key:
        """What it waits for or sends, by the microbatch of the whole minibatch."""
        return turn.kind is _FORWARD, turn.minibatch, self._replica + turn.microbatch * self._count


class _Machine:
    """All ranks and their cores, from one event to the next."""

    def __init__(
        self, ranks: list[_Rank], durations: Durations, replicas: Replicas, cores: int
    ) -> None:
        self._ranks, self._replicas, self._cores = ranks, replicas, cores
        d = durations
        self._loads = {
            _FORWARD: d.load_forward,
            Kind.BACKWARD: d.load_backward,
            Kind.BACKWARD_INPUT: d.load_backward,
            _WEIGHTS: (0.0,) * replicas.stages,
        }
        self._computes = {
            _FORWARD: d.forward,
            Kind.BACKWARD: d.backward,
            Kind.BACKWARD_INPUT: d.backward_input,
            _WEIGHTS: d.backward_weights,
        }
        self._sends = {True: d.activation, False: d.gradient}
        self._update = d.update
        self._now = self._served = 0.0  # the time, and what every rank that computes has got of it
        self._running: list[tuple[float, int, int]] = []
        self._wakes: list[tuple[float, int, int]] = []
        self._ready: dict[tuple[int, int], list[int]] = {}
        self._order = count()

    def run(self) -> Iterator[Span]:
        for rank in range(len(self._ranks)):
            self._next(rank)
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
                yield from self._ended(rank)
            else:
                self._served += (wake - self._now) * rate
                self._now, _, rank = heappop(self._wakes)
                self._compute(rank, self._computes)
        for state in self._ranks:
            if state.turn is not None:
                kind = state.turn.kind
                received = Kind.RECEIVE_ACTIVATION if kind is _FORWARD else Kind.RECEIVE_GRADIENT
                action = Instruction(received, *state.turn[1:])
                raise ScheduleError(state.stage, action, "never arrives: no rank can go on")

    def _next(self, rank: int) -> None:
        state = self._ranks[rank]
        state.turn = turn = next(state.turns, None)
        if turn is None:
            return
        if turn.kind is not _UPDATE:
            state.loading = True
            self._compute(rank, self._loads)
            return
        together = self._ready.setdefault((state.stage, turn.minibatch), [])
        together.append(rank)
        if len(together) == self._replicas.counts[state.stage]:
            for member in together:
                self._begin(member, self._update[state.stage])

    def _compute(self, rank: int, durations: dict[Kind, tuple[float, ...]]) -> None:
        state = self._ranks[rank]
        assert state.turn is not None
        self._begin(rank, durations[state.turn.kind][state.stage])

    def _begin(self, rank: int, duration: float) -> None:
        self._ranks[rank].begun = self._now
        heappush(self._running, (self._served + duration, next(self._order), rank))

    def _ended(self, rank: int) -> Iterator[Span]:
        state = self._ranks[rank]
        turn = state.turn
        assert turn is not None
        kind, i, j = turn
        if state.loading:
            state.loading = False
            if state.begun < self._now:
                yield Span(rank, "compute", LOADS[kind], i, j, state.begun, self._now, None)
            self._receive(rank)
            return
        yield Span(rank, "compute", kind, i, j, state.begun, self._now, None)
        if kind is not _UPDATE and kind is not _WEIGHTS:
            yield from self._send(rank)
        self._next(rank)

    def _receive(self, rank: int) -> None:
        """Go on when the input is there."""
        state = self._ranks[rank]
        assert state.turn is not None
        edge = 0 if state.turn.kind is _FORWARD else self._replicas.stages - 1
        key = state.of_minibatch(state.turn)
        if state.stage == edge or state.turn.kind is _WEIGHTS:
            heappush(self._wakes, (self._now, next(self._order), rank))
        elif key in state.arrived:
            at = max(self._now, state.arrived.pop(key))
            heappush(self._wakes, (at, next(self._order), rank))
        else:
            state.waits = key

    def _send(self, rank: int) -> Iterator[Span]:
        state = self._ranks[rank]
        assert state.turn is not None
        kind, i, j = state.turn
        ahead = kind is _FORWARD
        to = state.stage + (1 if ahead else -1)
        if not 0 <= to < self._replicas.stages:
            return
        start = max(self._now, state.free[ahead])
        state.free[ahead] = end = start + self._sends[ahead][state.stage]
        action = Kind.SEND_ACTIVATION if ahead else Kind.SEND_GRADIENT
        yield Span(rank, "to next" if ahead else "to previous", action, i, j, start, end, None)
        key = state.of_minibatch(state.turn)
        other = self._replicas.runs(to, key[2])
        receiver = self._ranks[other]
        if receiver.waits == key:
            receiver.waits = None
            heappush(self._wakes, (end, next(self._order), other))
        else:
            receiver.arrived[key] = end
