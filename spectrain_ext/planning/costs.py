"""Costs: how long everything takes, and what it holds, in one way to train a model on devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from spectrain_ext.method import (
    Method,
    Window,
    check_replicas,
    delay_under,
    places_of,
    rules_at,
)
from spectrain_ext.partitioning import BlockProfile, Profile
from spectrain_ext.schedule import (
    Count,
    Durations,
    Place,
    Replicas,
    Span,
    count_stage,
    find_generator,
    flushes,
    simulate,
    simulate_ranks,
    simulate_repeating,
    streams,
    summarize,
)

from .layers import Layers
from .link import Link
from .passes import STEP, passes_of

# As distributed/collectives.py cuts gradients, which are summed piece by piece.
_PIECES, _LEAST_BYTES, _MOST_BYTES = 8, 2**20, 25 * 2**20
_FLOAT = 4


class Setting:
    """What a plan is for.

    Args:
        layers: of the model.
        link: between any two devices.
        batch: samples of a minibatch, over all devices.
        cores: that all devices compute on together, as processes of one machine do; None: each has
            its own.
        state: bytes of the optimizer's state per byte of parameters: 1 is SGD's momentum, 2 Adam's.
    """

    def __init__(
        self, layers: Layers, link: Link, batch: int, cores: int | None = None, state: int = 1
    ) -> None:
        self.layers, self.link, self.batch = layers, link, batch
        self.cores, self.state = cores, state
        self._profiles: dict[int, Profile] = {}

    def profile(self, microbatches: int) -> Profile:
        """The model's blocks, for one of so many microbatches."""
        if microbatches not in self._profiles:
            self._profiles[microbatches] = self.layers.at(self.batch / microbatches)
        return self._profiles[microbatches]


@dataclass(frozen=True)
class Way:
    """One way to train: what ``DistributedPipeline`` is given.

    Attributes:
        method: the method.
        ends: of every stage, the index after its last block.
        replicas: of every stage.
        microbatches: of a minibatch.
        window: of the method's rule (None) or ``"wide"``.
    """

    method: Method
    ends: tuple[int, ...]
    replicas: tuple[int, ...]
    microbatches: int
    window: Window = None


class Costs:
    """What a way to train costs in a setting.

    Args:
        setting: the model, the devices and the minibatch.
        way: the method and the division.

    Attributes:
        places: of every stage; its replicas have the same.
        flushes: whether it is synchronous.

    Raises:
        ValueError: the method is not defined for these.
    """

    def __init__(self, setting: Setting, way: Way) -> None:
        self.setting, self.way = setting, way
        self._seats = Replicas(way.replicas)
        stages = len(way.ends)
        method = way.method
        self.places = places_of(method, stages, way.microbatches, way.window, self._seats)
        self.flushes = flushes(method.schedule)
        self._rules = [rules_at(method, place) for place in self.places]
        check_replicas(method, [self.places], self._seats)
        blocks = setting.profile(way.microbatches).blocks
        starts = (0, *way.ends[:-1])
        self._stages = [
            _Stage(blocks[start:end]) for start, end in zip(starts, way.ends, strict=True)
        ]
        self._reduced = [
            self._reduce(stage, r) for stage, r in zip(self._stages, way.replicas, strict=True)
        ]
        link = setting.link
        self._sent = [link.seconds(stage.outputs) for stage in self._stages[:-1]]
        handled = [0.0, *(link.handling(stage.outputs) for stage in self._stages[:-1]), 0.0]
        for stage, before, after in zip(self._stages, handled, handled[1:], strict=False):
            stage.forward += before + after
            stage.backward += before + after

    @cached_property
    def durations(self) -> Durations:
        """Of every stage, in seconds."""
        per_byte, stages = self.setting.layers.byte_seconds / _FLOAT, self._stages
        passes = [passes_of(self.way.method, self.places[0], place) for place in self.places]
        weights = [per_byte * stage.parameters for stage in stages]
        return Durations.of(
            len(stages),
            forward=[stage.forward for stage in stages],
            backward=[stage.backward for stage in stages],
            load_forward=[p.forward * w for p, w in zip(passes, weights, strict=True)],
            load_backward=[p.backward * w for p, w in zip(passes, weights, strict=True)],
            update=[
                p.update * w + reduced
                for p, w, reduced in zip(passes, weights, self._reduced, strict=True)
            ],
            activation=[*self._sent, 0.0],
            gradient=[0.0, *self._sent],
        )

    def _reduce(self, stage: _Stage, replicas: int) -> float:
        """What summing a gradient takes after the backward, beside which its first pieces go."""
        if replicas == 1 or not stage.parameters:
            return 0.0
        piece = min(max(stage.parameters / _PIECES, _LEAST_BYTES), _MOST_BYTES)
        pieces = max(1, round(stage.parameters / piece))
        whole = pieces * self.setting.link.all_reduce(stage.parameters / pieces, replicas)
        if self.setting.cores is not None:
            return whole  # the threads that sum take turns with the backward
        return max(whole / pieces, whole - stage.backward * (1 - 1 / pieces))

    # What it comes to.

    @property
    def delay(self) -> int:
        """The most updates that a forward is late."""
        schedule = self.way.method.schedule
        return max(delay_under(schedule, place) for place in self.places)

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of a device of every stage: weights, gradients, state, activations, messages.

        Weights are counted in buffers by the schedule's ledger, activations as what autograd keeps
        of the microbatches in flight. A stage with replicas has a copy of its gradients to sum.
        """
        found = []
        before = 0  # bytes of a stage's input
        for stage, r, place in zip(self._stages, self.way.replicas, self.places, strict=True):
            count = _count(self.way.method, self.places[0], place)
            copies = count.versions + 1 + (r > 1) + self.setting.state
            rings = (place.window + 1) * before + stage.outputs
            found.append(copies * stage.parameters + count.in_flight * stage.saved + rings)
            before = stage.outputs
        return tuple(found)

    @cached_property
    def bound(self) -> float:
        """Seconds that a minibatch takes at least, in the long run of any simulation.

        Without what it takes to have the weights, which only a count of the schedule tells.
        """
        stages, sent = self._stages, self._sent
        step = STEP * self.setting.layers.byte_seconds / _FLOAT
        parts = [place.microbatches for place in self.places]
        once = [stage.forward + stage.backward for stage in stages]
        work = [
            m * o + step * stage.parameters + reduced
            for m, o, stage, reduced in zip(parts, once, stages, self._reduced, strict=True)
        ]
        busiest = map(max, [0.0, *sent], [*sent, 0.0])
        found = [*work, *(m * seconds for m, seconds in zip(parts, busiest, strict=True))]
        if self.setting.cores is not None:
            all_work = sum(r * w for r, w in zip(self.way.replicas, work, strict=True))
            found.append(all_work / self.setting.cores)
        if self.flushes:
            # Before a stage's first microbatch come the forwards of those before it, and their
            # backwards after its last: a flush has nothing else to do meanwhile.
            above = accumulate(
                (o + 2 * s for o, s in zip(once[:-1], sent, strict=True)), initial=0.0
            )
            found += [
                before + m * o + step * stages[0].parameters
                for before, m, o in zip(above, parts, once, strict=True)
            ]
        else:
            # A window's worth of microbatches in the time that one takes to the end and back.
            trip = 0.0
            for k in reversed(range(len(stages))):
                trip += once[k] + (2 * sent[k] if k < len(sent) else 0.0)
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
        place = self.places[0]
        rounds = 1 if self.flushes else -(-place.window // place.microbatches)
        minibatches = 3 * (2 + 2 * rounds)
        if self._columns:
            windows = [place.window for place in self.places]
            method = self.way.method
            found = simulate_repeating(
                method.schedule, windows, place.microbatches, minibatches, self.durations
            )
            return max(found.period, self.bound)
        return max(summarize(self.spans(minibatches)).period, self.bound)

    @property
    def _columns(self) -> bool:
        """Whether replicas are so many pipelines beside one another, each on devices of its own."""
        cores, ranks = self.setting.cores, self._seats.ranks
        return len(set(self.way.replicas)) == 1 and (cores is None or cores >= ranks)

    def spans(self, minibatches: int) -> Iterator[Span]:
        """A simulated run: of one replica of every stage, where they all do the same at once."""
        method = self.way.method
        if self._columns:
            actions = streams(
                method.schedule,
                [place.window for place in self.places],
                self.places[0].microbatches,
            )
            return simulate(actions, self.durations, minibatches=minibatches, rules=self._rules)
        generate = find_generator(method.schedule)
        seats = self._seats
        runs = [generate(self.places[seats.seat(rank)[0]]) for rank in range(seats.ranks)]
        return simulate_ranks(
            runs, self.durations, seats, minibatches=minibatches, cores=self.setting.cores
        )


class _Stage:
    """What the blocks of a stage come to, for a microbatch."""

    def __init__(self, blocks: tuple[BlockProfile, ...]) -> None:
        self.forward = sum(block.parts[0] for block in blocks)
        self.backward = sum(block.parts[1] for block in blocks)
        self.parameters = sum(block.parameter_bytes for block in blocks)
        self.saved = sum(block.saved_bytes for block in blocks)
        self.outputs = blocks[-1].output_bytes


@lru_cache(maxsize=1 << 14)
def _count(method: Method, entry: Place, place: Place) -> Count:
    return count_stage(method.schedule, entry, place, rules_at(method, place), False)
