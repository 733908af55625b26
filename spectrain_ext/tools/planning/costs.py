"""Computes the time and the memory of one way to train a model on some devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import add

from spectrain_ext.method import (
    Method,
    Window,
    check_replicas,
    delay_under,
    places_of,
    rules_at,
)
from spectrain_ext.partitioning import BlockProfile, Profile
from spectrain_ext.passes.codecs import Codecs, packed_bytes
from spectrain_ext.schedule import (
    Count,
    Place,
    Replicas,
    count_stage,
    find_generator,
    flushes,
)
from spectrain_ext.tools.simulation import (
    Durations,
    simulate,
    simulate_ranks,
    summarize,
)
from spectrain_ext.transport import LEAST_BYTES, MOST_BYTES, PIECES

from .layers import Layers, Link

#: Bytes per float32 parameter of an SGD step: reads gradient, momentum, weight; writes two.
STEP = 20
_FLOAT = 4


class Setting:
    """The model, the devices and the minibatch that a plan is for."""

    def __init__(
        self,
        layers: Layers,
        link: Link | tuple[Link, ...],  # several: one between each two neighbours
        batch: int,
        cores: int | None = None,
        state: int = 1,
        speeds: Sequence[float] | None = None,  # of each device; None: as measured
        codecs: Codecs = (None, None),
        host: float = 0.0,  # seconds that a CPU needs to issue an instruction
    ) -> None:
        self.layers, self.batch, self._speeds = layers, batch, speeds
        self.host = host
        links = (link,) if isinstance(link, Link) else link
        self.inbound = any(one.inbound for one in links)  # all alike
        #: the distinct links from one device to another
        self.links = cache(
            lambda a, b: tuple(dict.fromkeys(links[a:b] if len(links) > 1 else links))
        )
        self.cores = cores  # shared by processes of one machine; None: each device has its own
        self.state = state  # bytes per byte of parameters: 1 is SGD's momentum, 2 Adam's
        #: packed bytes per byte of activations, and of gradients
        self.packed = [packed_bytes(one, 1.0, backward=n > 0) for n, one in enumerate(codecs)]
        self.unpacks = codecs[0] is not None
        #: the model's blocks for one microbatch, given the number of microbatches
        self.profile = cache(lambda microbatches: layers.at(batch / microbatches))

    def speeds(self, replicas: Sequence[int]) -> list[float] | None:
        """Return every stage's speed: that of its slowest replica, as all get equal shares."""
        return None if self._speeds is None else least_of(self._speeds, replicas)


@dataclass(frozen=True)
class Way:
    """One way to train: arguments of ``DistributedPipeline``, and ``ends`` of a ``Candidate``."""

    method: Method
    ends: tuple[int, ...]
    replicas: tuple[int, ...]
    microbatches: int
    window: Window = None


def least_of(values: Sequence[float], replicas: Sequence[int]) -> list[float]:
    """Return the least value over every stage's devices, which are numbered as ranks are."""
    return [min(values[a:b]) for a, b in pairwise(accumulate(replicas, initial=0))]


def check_shared(profile: Profile, ends: Sequence[int], replicas: Sequence[int]) -> None:
    for tie in profile.shared:
        first, last = (bisect_right(ends, block) for block in (tie.first, tie.last))
        if first != last and max(replicas[first], replicas[last]) > 1:
            raise ValueError(
                f"replicas: stages {first} and {last} share {tie.what}, and have "
                f"{replicas[first]} and {replicas[last]}; expected one each"
            )


class Costs:
    """The costs of a way to train; ValueError if its method does not support it."""

    def __init__(self, setting: Setting, way: Way) -> None:
        self.setting, self.way = setting, way
        self._replicas = Replicas(way.replicas)
        stages, method = len(way.ends), way.method
        self.places = places_of(method, stages, way.microbatches, way.window, self._replicas)
        first = self.places[0]
        #: minibatches in flight at the first stage; 0: the schedule flushes
        self.rounds = 0 if flushes(method.schedule) else -(-first.window // first.microbatches)
        for place in self.places:
            _rules_at(method, place)  # refuses places that the method does not support
        check_replicas(method, self.places, self._replicas)
        check_shared(setting.layers.profiles[1], way.ends, way.replicas)
        speeds = setting.speeds(way.replicas) or [1.0] * stages
        self._stages = [
            _StageCost(self.blocks[start:end], speeds[k], self.places[k], way.replicas[k])
            for k, (start, end) in enumerate(pairwise((0, *way.ends)))
        ]

    @property
    def blocks(self) -> tuple[BlockProfile, ...]:
        return self.setting.profile(self.way.microbatches).blocks

    @cached_property
    def durations(self) -> Durations:
        setting, stages = self.setting, self._stages
        ranks = [0, *accumulate(self.way.replicas)]  # the first of every stage
        pairs = []
        for stage, first, end in zip(stages, ranks, ranks[2:], strict=False):
            # The slowest link from a stage's first device to the next one's last.
            links, size = setting.links(first, end - 1), stage.outputs
            pairs.append((max(links, key=lambda link: link.seconds(size)), size))
        (sent, forth), (sent_back, back) = (
            (
                [link.seconds(part * size) for link, size in pairs],
                [0.0, *(link.handling(part * size) for link, size in pairs), 0.0],
            )
            for part in setting.packed
        )
        rows = []
        for k, stage in enumerate(stages):
            moved = passes_of(self.way.method, self.places[0], stage.place)
            pass_seconds = setting.layers.byte_seconds / _FLOAT * stage.parameters / stage.speed
            load_forward, load_backward, step = (each * pass_seconds for each in moved)
            # A device is not faster than the CPU that issues its instructions.
            forward = max(stage.forward + forth[k] + forth[k + 1], setting.host)
            backward = max(stage.backward + back[k] + back[k + 1], setting.host)
            update = step + self._reduce(stage, ranks[k])
            rows.append((forward, backward, load_forward, load_backward, update))
        names = "forward", "backward", "load_forward", "load_backward", "update"
        return Durations.of(
            len(stages),
            **dict(zip(names, zip(*rows, strict=True), strict=True)),
            activation=[*sent, 0.0],
            gradient=[0.0, *sent_back],
            inbound=setting.inbound,
        )

    def _reduce(self, stage: _StageCost, first: int) -> float:
        """Return the seconds of summing gradients that the backward does not hide."""
        replicas = stage.replicas
        if replicas == 1 or not stage.parameters:
            return 0.0
        piece = min(max(stage.parameters / PIECES, LEAST_BYTES), MOST_BYTES)
        pieces = max(1, round(stage.parameters / piece))
        links = self.setting.links(first, first + replicas - 1)
        whole = pieces * max(link.all_reduce(stage.parameters / pieces, replicas) for link in links)
        if self.setting.cores is not None:
            return whole  # the summing threads share cores with the backward
        return max(whole / pieces, whole - stage.backward * (1 - 1 / pieces))

    @property
    def limited_by_calls(self) -> tuple[int, ...]:
        """The stages whose forward or backward takes less time than the CPU needs to issue it."""
        host = self.setting.host
        shortest = (min(stage.forward, stage.backward) for stage in self._stages)
        return tuple(k for k, seconds in enumerate(shortest) if seconds < host)

    @property
    def seconds_of_calls(self) -> float:
        """The CPU's seconds per minibatch, if one process issues the instructions of all stages."""
        replicas = self.way.replicas
        forwards = sum(
            r * place.microbatches for r, place in zip(replicas, self.places, strict=True)
        )
        return 2 * forwards * self.setting.host

    @property
    def delay(self) -> int:
        return max(delay_under(self.way.method.schedule, place) for place in self.places)

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes per device of each stage: weights, gradients, state, activations, messages."""
        by_stage = []
        before = 0  # bytes of a stage's input
        for stage in self._stages:
            count = _count(self.way.method, self.places[0], stage.place)
            # The gradient, and with replicas the copy that is summed.
            copies = count.versions + 1 + (stage.replicas > 1) + self.setting.state
            rings = (
                round((stage.place.window + 1) * self.setting.packed[0] * before) + stage.outputs
            )
            if self.setting.unpacks:  # inputs are not receive buffers then
                rings += count.in_flight * before
            by_stage.append(copies * stage.parameters + count.in_flight * stage.saved + rings)
            before = stage.outputs
        return tuple(by_stage)

    @cached_property
    def bound(self) -> float:
        """A lower bound on the simulated seconds per minibatch of a long run."""
        d, replicas = self.durations, self.way.replicas
        sent, back = d.activation[:-1], d.gradient[1:]
        microbatches = [place.microbatches for place in self.places]
        lengths = zip(d.load_forward, d.forward, d.load_backward, d.backward, strict=True)
        once = list(map(sum, lengths))
        work = [m * o + u for m, o, u in zip(microbatches, once, d.update, strict=True)]
        # The busiest wire at a stage: of one direction, or the inbound one.
        ends = [0.0, *sent], [*back, 0.0], [*sent, 0.0], [0.0, *back]
        wires = map(add, *ends[:2]) if self.setting.inbound else map(max, *ends)
        bounds = [*work, *(m * seconds for m, seconds in zip(microbatches, wires, strict=True))]
        if self.setting.cores is not None:
            all_work = sum(r * w for r, w in zip(replicas, work, strict=True))
            bounds.append(all_work / self.setting.cores)
        if not self.rounds:
            # The earlier stages' forwards come before a stage's first microbatch, their backwards
            # after its last; with a flush nothing else happens meanwhile.
            above = accumulate(
                (o + s + b for o, s, b in zip(once[:-1], sent, back, strict=True)), initial=0.0
            )
            bounds += [
                before + m * o + d.update[0]
                for before, m, o in zip(above, microbatches, once, strict=True)
            ]
        else:
            # A window of microbatches in the time that one takes to the last stage and back.
            trip = 0.0
            for k in reversed(range(len(once))):
                trip += once[k] + (sent[k] + back[k] if k < len(sent) else 0.0)
                bounds.append(microbatches[k] * trip / self.places[k].window)
        return max(bounds)

    @cached_property
    def period(self) -> float:
        """Simulated seconds per minibatch; the bound, where the run is too short to reach it."""
        minibatches, cores = 3 * (2 + 2 * self.rounds), self.setting.cores
        generate = find_generator(self.way.method.schedule)
        if len(set(self.way.replicas)) == 1 and (cores is None or cores >= self._replicas.ranks):
            # Pipelines beside one another, on devices of their own: one stands for all.
            instructions = [generate(place) for place in self.places]
            spans = simulate(instructions, self.durations, minibatches=minibatches)
        else:
            instructions = [
                generate(self.places[self._replicas.stage_and_replica(rank)[0]])
                for rank in range(self._replicas.ranks)
            ]
            spans = simulate_ranks(
                instructions, self.durations, self._replicas, minibatches=minibatches, cores=cores
            )
        return max(summarize(spans).period, self.bound)


class _StageCost:
    def __init__(
        self, blocks: tuple[BlockProfile, ...], speed: float, place: Place, replicas: int
    ) -> None:
        self.speed, self.place, self.replicas = speed, place, replicas
        self.forward = sum(block.parts[0] for block in blocks) / speed
        self.backward = sum(block.parts[1] for block in blocks) / speed
        self.parameters = sum(block.parameter_bytes for block in blocks)
        self.saved = sum(block.saved_bytes for block in blocks)
        self.outputs = blocks[-1].output_bytes


_rules_at = lru_cache(maxsize=1 << 14)(rules_at)


@lru_cache(maxsize=1 << 14)
def _count(method: Method, entry: Place, place: Place) -> Count:
    return count_stage(method.schedule, entry, place, _rules_at(method, place), False)


def passes_of(method: Method, entry: Place, place: Place) -> tuple[float, float, float]:
    """Return the bytes read and written per float32 parameter, as means over a steady state.

    They are those that load the weights of a microbatch's forward and of its backward, and those of
    a minibatch's step. ``entry`` is the place of stage 0.
    """
    rules = _rules_at(method, place)
    older = rules.forward_reads != "newest"
    late = delay_under(method.schedule, entry if older else place) > 0
    forward = backward = 0.0
    step = STEP
    if rules.forward_horizon or rules.lead:
        if rules.law == "difference":
            forward = 12.0  # reads two versions, writes the prediction
        else:
            step += 4  # writes the next forward's prediction
    elif late and (older or rules.backward == "stash"):
        step += 8  # copies the version that is still needed
    if rules.backward == "predict" and 0 < rules.backward_horizon != rules.forward_horizon:
        backward = 12.0
    # The first microbatch loads, the others find the weights.
    return forward / place.microbatches, backward / place.microbatches, step
