"""Costs: how long everything takes, and what it holds, in one way to train a model on devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple, cast

from spectrain_ext.codecs import Codecs, packed_bytes
from spectrain_ext.method import (
    Method,
    Window,
    check_replicas,
    delay_under,
    find_method,
    places_of,
    rules_at,
)
from spectrain_ext.partitioning import BlockProfile, Profile
from spectrain_ext.schedule import (
    Count,
    Durations,
    Entries,
    Kind,
    Place,
    Replicas,
    Span,
    count_stage,
    find_generator,
    flushes,
    simulate,
    simulate_ranks,
    simulate_repeating,
    summarize,
)
from spectrain_ext.weights.storage import Content, Storage
from spectrain_ext.weights.versions import Versions

from .layers import Layers, Link

#: Bytes per float32 parameter of an SGD step: gradient, momentum, weight; the last two written.
STEP = 20
# As distributed/collectives.py cuts gradients, which are summed piece by piece.
_PIECES, _LEAST_BYTES, _MOST_BYTES = 8, 2**20, 25 * 2**20
_FLOAT = 4


class Setting:
    """What a plan is for: a model, and a minibatch of so many samples over all devices."""

    def __init__(
        self,
        layers: Layers,
        link: Link | tuple[Link, ...],  # several: one between each two neighbours
        batch: int,
        cores: int | None = None,
        state: int = 1,
        speeds: Sequence[float] | None = None,  # of each device; None: as measured
        codecs: Codecs = (None, None),
    ) -> None:
        self.layers, self.batch, self._speeds = layers, batch, speeds
        links = (link,) if isinstance(link, Link) else link
        self.inbound = any(one.inbound for one in links)  # all alike
        #: by which messages pass from one device to another, each once
        self.links = cache(
            lambda a, b: tuple(dict.fromkeys(links[a:b] if len(links) > 1 else links))
        )
        self.cores = cores  # shared by processes of one machine; None: each device has its own
        self.state = state  # bytes per byte of parameters: 1 is SGD's momentum, 2 Adam's
        #: what is left of a byte of activations, and of gradients, on an edge
        self.packed = [packed_bytes(one, 1.0, backward=n > 0) for n, one in enumerate(codecs)]
        self.unpacks = codecs[0] is not None
        #: the model's blocks, for one of so many microbatches
        self.profile = cache(lambda microbatches: layers.at(batch / microbatches))

    def speeds(self, replicas: Sequence[int]) -> list[float] | None:
        """Of every stage: microbatches are dealt out evenly, so that the slowest replica counts."""
        return None if self._speeds is None else least_of(self._speeds, replicas)


@dataclass(frozen=True)
class Way:
    """One way to train: what ``DistributedPipeline`` is given; ``ends`` as in a ``Candidate``."""

    method: Method
    ends: tuple[int, ...]
    replicas: tuple[int, ...]
    microbatches: int
    window: Window = None


def least_of(values: Sequence[float], replicas: Sequence[int]) -> list[float]:
    """Of the devices of every stage: these are numbered stage by stage, as ranks are."""
    return [min(values[a:b]) for a, b in pairwise(accumulate(replicas, initial=0))]


def check_shared(profile: Profile, ends: Sequence[int], replicas: Sequence[int]) -> None:
    """Raise ValueError where stages with a parameter in common have replicas."""
    for tie in profile.shared:
        first, last = (bisect_right(ends, block) for block in (tie.first, tie.last))
        if first != last and max(replicas[first], replicas[last]) > 1:
            raise ValueError(
                f"replicas: stages {first} and {last} share {tie.what}, and have "
                f"{replicas[first]} and {replicas[last]}; expected one each"
            )


class Costs:
    """What a way to train costs in a setting; ValueError where its method is not defined for it."""

    def __init__(self, setting: Setting, way: Way) -> None:
        self.setting, self.way = setting, way
        self._replicas = Replicas(way.replicas)
        stages = len(way.ends)
        method = way.method
        self.places = places_of(method, stages, way.microbatches, way.window, self._replicas)
        first = self.places[0]
        #: minibatches that the first stage has in flight; 0: the schedule flushes
        self.rounds = 0 if flushes(method.schedule) else -(-first.window // first.microbatches)
        self._rules = [_rules_at(method, place) for place in self.places]
        check_replicas(method, [self.places], self._replicas)
        check_shared(setting.layers.profiles[1], way.ends, way.replicas)
        blocks = self.blocks
        starts = (0, *way.ends[:-1])
        speeds = setting.speeds(way.replicas) or [1.0] * stages
        self._stages = [
            _StageCost(blocks[start:end], speed)
            for start, end, speed in zip(starts, way.ends, speeds, strict=True)
        ]
        ranks = [0, *accumulate(way.replicas)]  # the first of every stage
        self._reduced = [
            self._reduce(stage, r, first)
            for stage, r, first in zip(self._stages, way.replicas, ranks, strict=False)
        ]
        # Of the links from a stage's first device to the next one's last: the slowest.
        self._links = [
            max(setting.links(first, end - 1), key=lambda link: link.seconds(stage.outputs))
            for stage, first, end in zip(self._stages, ranks, ranks[2:], strict=False)
        ]
        pairs = [
            (link, stage.outputs) for link, stage in zip(self._links, self._stages, strict=False)
        ]
        (self._sent, forth), (self._sent_back, back) = (
            (
                [link.seconds(part * size) for link, size in pairs],
                [0.0, *(link.handling(part * size) for link, size in pairs), 0.0],
            )
            for part in setting.packed
        )
        for k, stage in enumerate(self._stages):
            stage.forward += forth[k] + forth[k + 1]
            stage.backward += back[k] + back[k + 1]

    @property
    def blocks(self) -> tuple[BlockProfile, ...]:
        """The model's, for one of the microbatches."""
        return self.setting.profile(self.way.microbatches).blocks

    @cached_property
    def durations(self) -> Durations:
        per_byte, stages = self.setting.layers.byte_seconds / _FLOAT, self._stages
        weights = [per_byte * stage.parameters / stage.speed for stage in stages]
        passes = (passes_of(self.way.method, self.places[0], place) for place in self.places)
        forward, backward, update = (
            [each * w for each, w in zip(moved, weights, strict=True)]
            for moved in zip(*passes, strict=True)
        )
        return Durations.of(
            len(stages),
            forward=[stage.forward for stage in stages],
            backward=[stage.backward for stage in stages],
            load_forward=forward,
            load_backward=backward,
            update=[u + reduced for u, reduced in zip(update, self._reduced, strict=True)],
            activation=[*self._sent, 0.0],
            gradient=[0.0, *self._sent_back],
            inbound=self.setting.inbound,
        )

    def _reduce(self, stage: _StageCost, replicas: int, first: int) -> float:
        """What summing a gradient takes after the backward, beside which its first pieces go."""
        if replicas == 1 or not stage.parameters:
            return 0.0
        piece = min(max(stage.parameters / _PIECES, _LEAST_BYTES), _MOST_BYTES)
        pieces = max(1, round(stage.parameters / piece))
        links = self.setting.links(first, first + replicas - 1)
        whole = pieces * max(link.all_reduce(stage.parameters / pieces, replicas) for link in links)
        if self.setting.cores is not None:
            return whole  # the threads that sum take turns with the backward
        return max(whole / pieces, whole - stage.backward * (1 - 1 / pieces))

    # What it comes to.

    @property
    def delay(self) -> int:
        return max(delay_under(self.way.method.schedule, place) for place in self.places)

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of a device of every stage: weights, gradients, state, activations, messages."""
        found = []
        before = 0  # bytes of a stage's input
        for stage, r, place in zip(self._stages, self.way.replicas, self.places, strict=True):
            count = _count(self.way.method, self.places[0], place)
            # The gradient, and of a stage with replicas the copy of it that is summed.
            copies = count.versions + 1 + (r > 1) + self.setting.state
            rings = round((place.window + 1) * self.setting.packed[0] * before) + stage.outputs
            if self.setting.unpacks:  # the inputs are no receive buffers
                rings += count.in_flight * before
            found.append(copies * stage.parameters + count.in_flight * stage.saved + rings)
            before = stage.outputs
        return tuple(found)

    @cached_property
    def bound(self) -> float:
        """Seconds that a minibatch takes at least, in the long run of any simulation."""
        # Without what it takes to have the weights, which only a count of the schedule tells.
        stages, sent, back = self._stages, self._sent, self._sent_back
        step = STEP * self.setting.layers.byte_seconds / _FLOAT
        parts = [place.microbatches for place in self.places]
        once = [stage.forward + stage.backward for stage in stages]
        work = [
            m * o + step * stage.parameters / stage.speed + reduced
            for m, o, stage, reduced in zip(parts, once, stages, self._reduced, strict=True)
        ]
        # The busiest wire at a stage: of one direction, or of all that comes.
        ends = [0.0, *sent], [*back, 0.0], [*sent, 0.0], [0.0, *back]
        wires = map(add, *ends[:2]) if self.setting.inbound else map(max, *ends)
        found = [*work, *(m * seconds for m, seconds in zip(parts, wires, strict=True))]
        if self.setting.cores is not None:
            all_work = sum(r * w for r, w in zip(self.way.replicas, work, strict=True))
            found.append(all_work / self.setting.cores)
        if not self.rounds:
            # Before a stage's first microbatch come the forwards of those before it, and their
            # backwards after its last: a flush has nothing else to do meanwhile.
            above = accumulate(
                (o + s + b for o, s, b in zip(once[:-1], sent, back, strict=True)), initial=0.0
            )
            found += [
                before + m * o + step * stages[0].parameters / stages[0].speed
                for before, m, o in zip(above, parts, once, strict=True)
            ]
        else:
            # A window's worth of microbatches in the time that one takes to the end and back.
            trip = 0.0
            for k in reversed(range(len(stages))):
                trip += once[k] + (sent[k] + back[k] if k < len(sent) else 0.0)
                found.append(parts[k] * trip / self.places[k].window)
        return max(found)

    @property
    def work(self) -> float:
        """Seconds that all devices compute for a minibatch."""
        d = self.durations
        turns = zip(d.load_forward, d.forward, d.load_backward, d.backward, strict=True)
        shares = zip(turns, d.update, self.places, self.way.replicas, strict=True)
        return sum(
            r * (place.microbatches * sum(turn) + update) for turn, update, place, r in shares
        )

    @cached_property
    def period(self) -> float:
        """Seconds of a minibatch, simulated; the bound, where a run is too short to come to it."""
        minibatches = 3 * (2 + 2 * max(1, self.rounds))
        if self._columns:
            parts, schedule = self.places[0].microbatches, self.way.method.schedule
            windows = [place.window for place in self.places]
            found = simulate_repeating(schedule, windows, parts, minibatches, self.durations)
        else:
            found = summarize(self.spans(minibatches))
        return max(found.period, self.bound)

    @property
    def _columns(self) -> bool:
        """Whether replicas are so many pipelines beside one another, each on devices of its own."""
        cores, ranks = self.setting.cores, self._replicas.ranks
        return len(set(self.way.replicas)) == 1 and (cores is None or cores >= ranks)

    def spans(self, minibatches: int) -> Iterator[Span]:
        """A simulated run: of one replica of every stage, where they all do the same at once."""
        generate, replicas = find_generator(self.way.method.schedule), self._replicas
        if self._columns:
            actions = [generate(place) for place in self.places]
            return simulate(actions, self.durations, minibatches=minibatches, rules=self._rules)
        runs = [
            generate(self.places[replicas.stage_and_replica(rank)[0]])
            for rank in range(replicas.ranks)
        ]
        return simulate_ranks(
            runs, self.durations, replicas, minibatches=minibatches, cores=self.setting.cores
        )


class _StageCost:
    """What the blocks of a stage come to, for a microbatch."""

    def __init__(self, blocks: tuple[BlockProfile, ...], speed: float) -> None:
        self.speed = speed
        self.forward = sum(block.parts[0] for block in blocks) / speed
        self.backward = sum(block.parts[1] for block in blocks) / speed
        self.parameters = sum(block.parameter_bytes for block in blocks)
        self.saved = sum(block.saved_bytes for block in blocks)
        self.outputs = blocks[-1].output_bytes


_rules_at = lru_cache(maxsize=1 << 14)(rules_at)


@lru_cache(maxsize=1 << 14)
def _count(method: Method, entry: Place, place: Place) -> Count:
    return count_stage(method.schedule, entry, place, _rules_at(method, place), False)


class Passes(NamedTuple):
    """Bytes read and written per float32 parameter, the mean over a run's steady state."""

    forward: float  # to have the weights of a microbatch's forward
    backward: float  # of its backward
    update: float  # of a minibatch's step, with the prediction that it may write


class _Buffer:
    """Stands for a ``VersionBuffer``, without memory."""

    def __init__(self) -> None:
        self.content: Content | None = None


class _Books:
    """Stands for ``Storage``: has buffers of no memory."""

    same_dtype = predicts = True
    most, hosted = None, ()

    def __init__(self, master: bool) -> None:
        self.home = _Buffer()
        self.pool = [self.home]
        self.master = _Buffer() if master else None
        self.true = self.master or self.home

    def new_buffer(self) -> _Buffer:
        self.pool.append(_Buffer())
        return self.pool[-1]


@lru_cache(maxsize=1 << 14)
def passes_of(method: str | Method, entry: Place, place: Place) -> Passes:
    """Counts by the engine's own books; ``entry`` is the place of stage 0."""
    method = find_method(method)
    rules, parts = _rules_at(method, place), place.microbatches
    generate = find_generator(method.schedule)
    books = _Books(rules.predicts)
    versions = Versions(
        rules, place, Entries(generate(entry)), cast(Storage, books), lambda: (0.1,)
    )
    warm = (entry.window + place.window) // parts + 2
    end = warm + max(4, warm)
    found = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.UPDATE: 0}
    following = generate(place)
    turn = next(following)
    while versions.version < end:
        then = next(following)
        kind, i, j = turn
        counted, moved = versions.version >= warm, 0
        if kind is Kind.UPDATE:
            ahead = (then.minibatch, then.microbatch) if then.kind is Kind.FORWARD else None
            update = versions.begin_update(ahead)
            if update.kept is not None and books.master is None:
                books.true = cast(_Buffer, update.kept)
            moved = STEP + 8 * (update.kept is not None) + 4 * (update.room is not None)
        else:
            if kind is Kind.FORWARD:
                wanted = versions.for_forward(i, j)
            else:
                wanted = versions.for_backward(i, j, kind is not Kind.BACKWARD_INPUT)
                kind = Kind.BACKWARD  # both halves of it
            if versions.find(wanted) is None:
                versions.room(wanted)
                moved = 12 if wanted.law else 8
        if counted:
            found[kind] += moved
        turn = then
    updates = end - warm
    return Passes(
        found[Kind.FORWARD] / (updates * parts),
        found[Kind.BACKWARD] / (updates * parts),
        found[Kind.UPDATE] / updates,
    )
