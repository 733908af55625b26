"""Simulates when every instruction of a schedule runs and which weights it reads."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Literal, NamedTuple

from spectrain_ext.schedule import (
    Generator,
    Instruction,
    Kind,
    Place,
    Rules,
    device_order,
    find_generator,
    open_ledgers,
)

PerStage = float | Sequence[float]
_LONGEST = 1e100  # sums and products of such durations stay finite


def streams(
    schedule: str | Generator, windows: Sequence[int], microbatches: int = 1
) -> list[Iterator[Instruction]]:
    """Return the endless stream of what each stage computes.

    Args:
        schedule: a name in ``GENERATORS``, or a generator.
        windows: the window of each stage, in microbatches; one per stage.
        microbatches: per minibatch.

    Raises:
        ValueError: an unknown name; a window or ``microbatches`` is below 1.

    Example:
        >>> from itertools import islice
        >>> from spectrain_ext.tools.simulation import streams
        >>> [each.kind.value for each in islice(streams("1f1b-async", [2, 1])[0], 5)]
        ['forward', 'forward', 'backward', 'update', 'forward']
    """
    generate = find_generator(schedule)
    if microbatches < 1:
        raise ValueError(f"microbatches: expected at least 1, got {microbatches}")
    for k, window in enumerate(windows):
        if window < 1:
            raise ValueError(f"windows[{k}]: expected at least 1 microbatch, got {window}")
    n = len(windows)
    return [generate(Place(k, n, window, microbatches)) for k, window in enumerate(windows)]


@dataclass(frozen=True)
class Durations:
    """How long everything takes, in any unit, one value per stage.

    Attributes:
        forward: of one microbatch.
        backward: of one microbatch, both halves.
        update: of one minibatch.
        load_forward: to make the forward's weights available, for example by predicting them.
        load_backward: the same for the backward's weights; its second half needs none.
        activation: to send activations to the next stage; the last stage's is not used.
        gradient: to send gradients to the previous stage; the first stage's is not used.
        backward_weights: the second half of a backward: the weights' gradients.
        inbound: whether a device receives activations and gradients over one wire, one after
            another, in the order in which it asks for them. Else each direction between two stages
            has a wire.

    Example:
        >>> from spectrain_ext.tools.simulation import Durations
        >>> times = Durations.of(2, forward=1.0, backward=[2.0, 3.0])
        >>> times.forward, times.backward, times.backward_weights
        ((1.0, 1.0), (2.0, 3.0), (1.0, 1.5))
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    load_forward: tuple[float, ...]
    load_backward: tuple[float, ...]
    activation: tuple[float, ...]
    gradient: tuple[float, ...]
    backward_weights: tuple[float, ...]
    inbound: bool = False

    @property
    def backward_input(self) -> tuple[float, ...]:
        """The first half of a backward: the input's gradient."""
        return tuple(map(sub, self.backward, self.backward_weights))

    @classmethod
    def of(
        cls,
        stages: int,
        *,
        forward: PerStage = 1.0,
        backward: PerStage = 1.0,
        update: PerStage = 0.0,
        load_forward: PerStage = 0.0,
        load_backward: PerStage = 0.0,
        activation: PerStage = 0.0,
        gradient: PerStage = 0.0,
        backward_weights: PerStage | None = None,
        inbound: bool = False,
    ) -> Durations:
        """Return durations of a pipeline; a single number applies to every stage.

        ``backward_weights`` defaults to half of ``backward``.

        Raises:
            ValueError: a duration is not from 0 to 1e100, there is not one per stage, or the second
                half of a backward is longer than the whole.
        """
        numbers = {
            "forward": forward,
            "backward": backward,
            "update": update,
            "load_forward": load_forward,
            "load_backward": load_backward,
            "activation": activation,
            "gradient": gradient,
        }
        per_stage = {name: _per_stage(name, value, stages) for name, value in numbers.items()}
        whole = per_stage["backward"]
        halves = tuple(each / 2 for each in whole)
        if backward_weights is not None:
            halves = _per_stage("backward_weights", backward_weights, stages)
        for k, (half, both) in enumerate(zip(halves, whole, strict=True)):
            if half > both:
                raise ValueError(
                    f"backward_weights: expected no more than the backward of stage {k}, {both}, "
                    f"got {half}"
                )
        return cls(**per_stage, backward_weights=halves, inbound=inbound)


def _per_stage(name: str, value: PerStage, stages: int) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * stages
    if len(values) != stages:
        raise ValueError(f"{name}: expected one duration per stage, {stages}, got {len(values)}")
    for k, duration in enumerate(values):
        if not 0 <= duration <= _LONGEST:
            raise ValueError(
                f"{name}: expected a duration from 0 to {_LONGEST:g} for stage {k}, got {duration}"
            )
    return values


#: A stage's computations, and its copies to either neighbour; a lane does one thing at a time.
Lane = Literal["compute", "to next", "to previous"]


class Span(NamedTuple):
    """One action of a stage, from start to end.

    Attributes:
        stage: the stage.
        lane: what is busy: ``"compute"``, ``"to next"`` or ``"to previous"``.
        kind: a forward, backward, update or send, or a load if loads take time.
        minibatch: the minibatch.
        microbatch: the microbatch.
        start: when it begins, in the unit of the durations; 0 for the first.
        end: when it ends.
        version: updates in the weights that it reads, or that an update has made; None for a send.
        horizon: by how many updates these weights are predicted ahead.

    Example:
        >>> from spectrain_ext.tools.simulation import Durations, simulate, streams
        >>> span = next(simulate(streams("1f1b-async", [1]), Durations.of(1), minibatches=2))
        >>> span.kind.value, span.start, span.end, span.version
        ('forward', 0.0, 1.0, 0)
    """

    stage: int
    lane: Lane
    kind: Kind
    minibatch: int
    microbatch: int
    start: float
    end: float
    version: int | None
    horizon: int = 0


@dataclass(frozen=True)
class Summary:
    """The result of a simulation.

    Attributes:
        makespan: the end of the last action.
        period: mean time between updates of stage 0, over the middle third of the run; over all of
            it if that has fewer than two updates, and 0 if the run has.
        busy: per stage, the share of the makespan in which it computes, loads or updates.

    Example:
        >>> from spectrain_ext.tools.simulation import Summary
        >>> Summary(makespan=10.0, period=2.0, busy=(0.75, 1.0)).bubbles
        (0.25, 0.0)
    """

    makespan: float
    period: float
    busy: tuple[float, ...]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Per stage, the share of the makespan in which it idles."""
        return tuple(1.0 - share for share in self.busy)


def simulate(
    actions: Sequence[Iterable[Instruction]],
    durations: Durations,
    *,
    minibatches: int | None = None,
    rules: Sequence[Rules] | None = None,
    devices: Sequence[int] | None = None,
) -> Iterator[Span]:
    """Yield the spans of every action of every stage, lazily, those of each lane in order.

    A stage begins an action when the one before has ended and, for a forward or a backward, its
    input has arrived. It loads weights before it waits for the input. A send begins when its value
    has been computed and the message before it on the same wire has arrived; the stage continues
    meanwhile. Batches are available from the start. A device with several stages does one thing at
    a time, in the order of ``device_order``.

    Args:
        actions: per stage; finite, or endless with ``minibatches``.
        durations: of every stage.
        minibatches: the length of the run.
        rules: which weights every stage reads; None: the newest.
        devices: of every stage, from 0; None: one each.

    Raises:
        ScheduleError: the schedule cannot run.
        ValueError: ``durations`` or ``devices`` are for another number of stages.

    Example:
        >>> from spectrain_ext.tools.simulation import Durations, simulate, streams, summarize
        >>> spans = simulate(streams("1f1b-async", [2, 1]), Durations.of(2), minibatches=10)
        >>> summarize(spans).period
        2.0
    """
    n = len(actions)
    if len(durations.forward) != n:
        raise ValueError(f"durations: expected {n} stages, got {len(durations.forward)}")
    device_of = devices or range(n)
    actions, ledgers = open_ledgers(actions, rules)
    free = [0.0] * (1 + max(device_of, default=-1))
    takes = [takes_of(durations, k) for k in range(n)]
    received, sent = _edges(durations, device_of)
    for k, instruction in device_order(actions, device_of, minibatches):
        kind, i, j = instruction
        version, horizon = ledgers[k].enter(instruction)
        load, compute = takes[k][kind]
        begun = free[device_of[k]]
        start = loaded = begun + load
        if arriving := received[k].get(kind):
            sender, leaves, arrives = arriving.receive()
            yield Span(sender, *SENDS[kind], i, j, leaves, arrives, None)
            start = max(loaded, arrives)
        free[device_of[k]] = end = start + compute
        if leaving := sent[k].get(kind):
            leaving.sent.append(end)
        if begun < loaded:
            yield Span(k, "compute", LOADS[kind], i, j, begun, loaded, version, horizon)
        yield Span(k, "compute", kind, i, j, start, end, version, horizon)
    for ledger in ledgers:
        ledger.close(minibatches)


#: The load before an instruction, if it takes time, and the message after it.
LOADS = {
    Kind.FORWARD: Kind.LOAD_FORWARD,
    Kind.BACKWARD: Kind.LOAD_BACKWARD,
    Kind.BACKWARD_INPUT: Kind.LOAD_BACKWARD_INPUT,
}
SENDS: dict[Kind, tuple[Lane, Kind]] = {
    Kind.FORWARD: ("to next", Kind.SEND_ACTIVATION),
    Kind.BACKWARD: ("to previous", Kind.SEND_GRADIENT),
    Kind.BACKWARD_INPUT: ("to previous", Kind.SEND_GRADIENT),
}


def takes_of(d: Durations, k: int) -> dict[Kind, tuple[float, float]]:
    """Return how long a stage loads and computes for each kind of instruction."""
    return {
        Kind.FORWARD: (d.load_forward[k], d.forward[k]),
        Kind.BACKWARD: (d.load_backward[k], d.backward[k]),
        Kind.BACKWARD_INPUT: (d.load_backward[k], d.backward_input[k]),
        Kind.BACKWARD_WEIGHTS: (0.0, d.backward_weights[k]),
        Kind.UPDATE: (0.0, d.update[k]),
    }


class _Edge:
    """What a stage has sent to a neighbour, and the wire that carries it."""

    def __init__(self, sender: int, takes: float, wire: list[float]) -> None:
        self.sent: deque[float] = deque()
        self._sender, self._takes, self._wire = sender, takes, wire

    def receive(self) -> tuple[int, float, float]:
        """Return the next message's sender, and when it enters the wire and arrives."""
        leaves = max(self.sent.popleft(), self._wire[0])
        self._wire[0] = arrives = leaves + self._takes
        return self._sender, leaves, arrives


_StageEdges = dict[Kind, _Edge]


def _edges(d: Durations, device_of: Sequence[int]) -> tuple[list[_StageEdges], list[_StageEdges]]:
    """Return the edges over which each stage receives, and over which it sends, by instruction."""
    n = len(d.forward)
    received: list[_StageEdges] = [{} for _ in range(n)]
    sent: list[_StageEdges] = [{} for _ in range(n)]
    wires: defaultdict[object, list[float]] = defaultdict(lambda: [0.0])
    for k in range(n - 1):
        for sender, to, takes, kinds in (
            (k, k + 1, d.activation[k], (Kind.FORWARD,)),
            # of a whole backward or its first half
            (k + 1, k, d.gradient[k + 1], (Kind.BACKWARD, Kind.BACKWARD_INPUT)),
        ):
            edge = _Edge(sender, takes, wires[device_of[to] if d.inbound else (sender, to)])
            for kind in kinds:
                received[to][kind] = sent[sender][kind] = edge
    return received, sent


def summarize(spans: Iterable[Span], devices: Sequence[int] | None = None) -> Summary:
    """Summarize the spans of a simulation or of a real run.

    Args:
        spans: of all stages.
        devices: of every stage, from 0; ``busy`` and ``bubbles`` are then per device.

    Example:
        >>> from spectrain_ext.tools.simulation import Durations, simulate, streams, summarize
        >>> spans = simulate(streams("1f1b", [2, 1], 2), Durations.of(2), minibatches=1)
        >>> summary = summarize(spans)
        >>> summary.makespan, round(summary.bubbles[0], 3)
        (6.0, 0.333)
    """
    busy: list[float] = []
    updates: list[float] = []
    makespan = 0.0
    for span in spans:
        makespan = max(makespan, span.end)
        if span.lane != "compute":
            continue
        row = span.stage if devices is None else devices[span.stage]
        busy.extend([0.0] * (row + 1 - len(busy)))
        busy[row] += span.end - span.start
        if span.kind is Kind.UPDATE and span.stage == 0:
            updates.append(span.end)
    return Summary(makespan, period_of(updates), tuple(time / (makespan or 1.0) for time in busy))


def period_of(updates: Sequence[float]) -> float:
    first, last = len(updates) // 3, 2 * len(updates) // 3
    if last <= first:
        first, last = 0, len(updates) - 1
    return (updates[last] - updates[first]) / (last - first) if last > first else 0.0
