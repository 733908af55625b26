"""Searches all ways to train a model on some devices for the best, by bounds and simulation."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from itertools import accumulate, combinations, pairwise
from math import comb, lcm

from spectrain_ext.method import Method, Window
from spectrain_ext.partitioning import BlockProfile, Profile, cut, open_places
from spectrain_ext.schedule import takes_window

from .costs import Costs, Setting, Way, check_shared, least_of

# Up to this many divisions, all are tried; beyond, the one whose slowest stage is fastest.
_FEW = 32
# Most devices with uneven replicas, and the uneven numbers of replicas kept per number of stages.
_UNEVEN, _KEPT = 8, 3
# Microbatches per stage, at most: the bubble of a flush is then an eighth of a minibatch at most.
_FLUSH = 8
# Simulations per method and objective.
_MOST = 8


class Search:
    """All ways to train by some methods on all devices, with their costs."""

    def __init__(
        self,
        setting: Setting,
        devices: int,
        methods: Sequence[Method],
        memory: Sequence[float] | None = None,  # bytes of each device
        replicas: int | None = None,
    ) -> None:
        self._setting, self._devices, self._methods = setting, devices, methods
        self._memory = memory
        self._most_replicas = devices if replicas is None else replicas
        self.simulated = 0  # of the ways tried
        self.refusal: ValueError | None = None  # the first way that its method refused
        # Needed and available bytes of the fullest device, by the id of the ``Costs``.
        self._too_large: dict[int, tuple[float, float]] = {}
        self._by_method: dict[str, list[Costs]] = {method.name: [] for method in methods}
        for costs in self._all():
            self._by_method[costs.way.method.name].append(costs)
        self.tried = sum(map(len, self._by_method.values()))

    @property
    def left_out(self) -> int:
        """The number of ways with a good enough bound that need more memory than there is."""
        return len(self._too_large)

    @property
    def closest(self) -> tuple[float, float]:
        """Needed and available bytes of the fullest device, for the smallest of these ways."""
        return min(self._too_large.values(), key=_share, default=(math.inf, math.inf))

    def best(self, method: Method, price: Callable[[Costs], float]) -> Costs | None:
        """Return a method's way with the least finite period times price; None: there is none."""
        # Simulate in the order of bounds, until the next bound exceeds the best value so far, which
        # is then the least of all, or until ``_MOST`` simulations.
        best, least, left = None, math.inf, _MOST
        ways = [(costs.bound * price(costs), costs) for costs in self._by_method[method.name]]
        for bound, costs in sorted(ways, key=lambda way: way[0]):
            if bound >= least or not left:
                break
            if not self._fits(costs):
                continue
            left -= 1
            self.simulated += "period" not in costs.__dict__
            value = costs.period * price(costs)
            if value < least:
                best, least = costs, value
        return best

    def _fits(self, costs: Costs) -> bool:
        if self._memory is None:
            return True
        limits = least_of(self._memory, costs.way.replicas)
        fullest = max(zip(costs.memory, limits, strict=True), key=_share)
        fits = _share(fullest) <= 1
        if not fits:
            self._too_large[id(costs)] = fullest
        return fits

    def _all(self) -> Iterator[Costs]:
        batch = self._setting.batch
        for replicas in self._shapes():
            if max(replicas) > self._most_replicas:
                continue
            each = lcm(*replicas)
            most = min(each * _FLUSH * len(replicas), batch)
            for microbatches in (m for m in range(each, most + 1, each) if batch % m == 0):
                for ends in self._divisions(replicas, microbatches):
                    for method in self._methods:
                        yield from self._costs(method, ends, replicas, microbatches)

    def _costs(
        self, method: Method, ends: tuple[int, ...], replicas: tuple[int, ...], microbatches: int
    ) -> Iterator[Costs]:
        alone = len(ends) == 1
        if alone != (method.name == "sync"):  # one stage is data parallelism under any method
            return
        windows: tuple[Window, ...] = (None, "wide") if takes_window(method.schedule) else (None,)
        for window in windows:
            try:
                yield Costs(self._setting, Way(method, ends, replicas, microbatches, window))
            except ValueError as error:  # the method does not support these
                self.refusal = self.refusal or error

    def _shapes(self) -> Iterator[tuple[int, ...]]:
        blocks = len(self._setting.layers.profiles[1].blocks)
        for stages in range(1, min(blocks, self._devices) + 1):
            if self._devices % stages == 0:
                yield (self._devices // stages,) * stages
            if stages > 1 and self._devices <= _UNEVEN:
                uneven = [s for s in _sums(self._devices, stages) if len(set(s)) > 1]
                yield from nsmallest(_KEPT, uneven, key=self._slowest)

    def _slowest(self, replicas: tuple[int, ...]) -> float:
        """Return a minibatch's seconds on the slowest stage, with a microbatch per replica."""
        microbatches = lcm(*replicas)
        if self._setting.batch % microbatches:
            return math.inf
        profile, speeds = self._work(microbatches), self._setting.speeds(replicas)
        try:
            best = cut(profile, len(replicas), replicas=replicas, speeds=speeds)
            check_shared(profile, best.ends, replicas)
        except ValueError:  # ties leave too few places, or allow one replica only
            return math.inf
        return best.slowest

    def _divisions(self, replicas: tuple[int, ...], microbatches: int) -> Iterator[tuple[int, ...]]:
        profile, stages = self._work(microbatches), len(replicas)
        places = open_places(profile)
        if len(places) < stages - 1:
            return
        if comb(len(places), stages - 1) <= _FEW:
            for inner in combinations(places, stages - 1):
                yield (*inner, len(profile.blocks))
            return
        speeds = self._setting.speeds(replicas)
        shared_out = partial(cut, profile, stages, replicas=replicas, speeds=speeds)
        best = shared_out().ends
        yield best
        others = set()
        links, ranks = self._setting.links, [0, *accumulate(replicas)]
        if len(links(0, self._devices - 1)) > 1:
            # One more, which sends few bytes over slow links: the bandwidths are those of a
            # minibatch with a microbatch's bytes.
            widths = [
                min(link.bandwidth for link in links(first, end - 1)) / microbatches
                for first, end in zip(ranks, ranks[2:], strict=False)
            ]
            others.add(shared_out(bandwidth=widths).ends)
        if self._memory is not None:
            # A stage's memory depends on the method: one cut for the default's memory, and one that
            # balances bytes instead of time.
            limits = least_of(self._memory, replicas)
            with suppress(ValueError):
                others.add(shared_out(memory_limit=list(map(int, limits))).ends)
            by_bytes = tuple(
                _taking(b, float(4 * b.parameter_bytes + b.saved_bytes)) for b in profile.blocks
            )
            shares = [limit / max(limits) for limit in limits]
            others.add(cut(Profile(by_bytes, profile.ties), stages, speeds=shares).ends)
        yield from others - {best}

    def _work(self, microbatches: int) -> Profile:
        """Return the blocks with their seconds per minibatch, including the update."""
        profile, per_byte = self._setting.profile(microbatches), self._setting.layers.byte_seconds
        blocks = tuple(
            _taking(b, microbatches * b.seconds + 5 * per_byte * b.parameter_bytes)
            for b in profile.blocks
        )
        return replace(profile, blocks=blocks)


def _taking(block: BlockProfile, seconds: float) -> BlockProfile:
    return replace(block, seconds=seconds, forward_seconds=None)


def _share(pair: tuple[float, float]) -> float:
    needed, available = pair
    return needed / available


def _sums(total: int, count: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, total), count - 1):
        bounds = (0, *inner, total)
        yield tuple(b - a for a, b in pairwise(bounds))
