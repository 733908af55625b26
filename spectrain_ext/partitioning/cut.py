"""Cut: where a sequence of blocks is divided so that the slowest stage is as fast as possible."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, Protocol

from spectrain_ext.files import read_json

from .profile import BlockProfile, Profile, Tie, made_of, one_each

# (stage k, number of stages) -> how many
StageCount = Callable[[int, int], int]

_NEVER = float("inf")
_LARGEST = 1 << 24  # bytes of a file

#: Of a plan's document; another one is refused.
PLAN_FORMAT = 1


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """What a stage will cost, by the profile.

    Attributes:
        blocks: the half-open range of its blocks.
        compute_seconds: forward and backward of one microbatch, over its replicas and their speed.
        transfer_seconds: activations and gradients through both its edges; 0 without a bandwidth.
        parameter_bytes: of its parameters, once.
        memory_bytes: all copies of the parameters, and what its window of microbatches keeps.
        speed: its devices compute so many times as fast as what was measured.
    """

    blocks: range
    compute_seconds: float
    transfer_seconds: float
    parameter_bytes: int
    memory_bytes: int
    speed: float = 1.0

    @property
    def seconds(self) -> float:
        """Compute and transfer, one after the other."""
        return self.compute_seconds + self.transfer_seconds


@dataclass(frozen=True, slots=True)
class Cut:
    """A division of blocks into stages.

    Attributes:
        ends: per stage, the index after its last block.
        stages: an estimate per stage.
    """

    ends: tuple[int, ...]
    stages: tuple[StageEstimate, ...]

    @property
    def bottleneck(self) -> int:
        """Index of the slowest stage; the first one of several."""
        return max(range(len(self.stages)), key=lambda k: (self.stages[k].seconds, -k))

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return self.stages[self.bottleneck].seconds

    @property
    def balance(self) -> float:
        """The mean stage's time over the slowest one's: 1 when all are equal."""
        slowest = self.slowest
        total = sum(stage.seconds for stage in self.stages)
        return total / len(self.stages) / slowest if slowest else 1.0

    def __str__(self) -> str:
        unequal = any(stage.speed != 1 for stage in self.stages)
        heading = f"{'stage':>5} {'blocks':>9} {'ms':>9} {'transfer':>9} {'MiB':>9}"
        rows = [heading + f" {'speed':>9}" * unequal]
        for k, stage in enumerate(self.stages):
            blocks = f"{stage.blocks.start}..{stage.blocks.stop - 1}"
            rows.append(
                f"{k:>5} {blocks:>9} {1e3 * stage.compute_seconds:>9.3f} "
                f"{1e3 * stage.transfer_seconds:>9.3f} {stage.memory_bytes / 2**20:>9.1f}"
                + f" {stage.speed:>9.4g}"
                * unequal
            )
        rows.append(f"slowest: stage {self.bottleneck}; balance {100 * self.balance:.0f} %")
        return "\n".join(rows)


def classic_window(k: int, n: int) -> int:
    """Microbatches that stage k of n has in flight under one-forward-one-backward."""
    return n - k


def cut(
    profile: Profile,
    n_stages: int,
    *,
    speeds: Sequence[float] | None = None,
    bandwidth: float | Sequence[float] | None = None,
    memory_limit: int | Sequence[int] | None = None,
    weight_copies: int | StageCount = 4,
    window: int | StageCount = classic_window,
    replicas: Sequence[int] | None = None,
) -> Cut:
    """Return the division whose slowest stage is fastest; of those the most even one.

    A stage's time is that of its blocks, over its speed, and, with a ``bandwidth``, of what passes
    its two edges: an activation one way and a gradient of the same size the other. Its memory is
    ``weight_copies`` times its parameters and ``window`` times what its blocks keep for their
    backwards.

    Args:
        profile: measured by ``measure``, or made up.
        n_stages: at least 1.
        speeds: per stage, how many times as fast as what was measured its devices compute; None:
            like it.
        bandwidth: bytes per second between neighbouring stages, or one number for each boundary
            between two. None: transfers are free, as where they run beside the computation.
        memory_limit: bytes that a stage may take, or one number per stage.
        weight_copies: weights, gradients, optimizer state and kept versions, counted in copies of
            the parameters; by default true weights, working weights, gradients and momentum. A
            number, or a function of (k, n_stages).
        window: microbatches a stage has in flight, likewise.
        replicas: of every stage, among which its microbatches are dealt out; None: one.

    Raises:
        ValueError: an argument out of range, fewer places to cut than needed (the message names
            what is shared between blocks), or a memory limit that no division keeps.

    The search is exact, by dynamic programming: ``O(n_stages * blocks**2)``.
    """
    blocks = len(profile.blocks)
    if not 1 <= n_stages <= blocks:
        raise ValueError(f"n_stages: expected 1 to {blocks} (the blocks), got {n_stages}")
    paces = one_each("speeds", (1.0,) * n_stages if speeds is None else speeds, n_stages, "stage")
    widths = None
    if bandwidth is not None:
        widths = one_each("bandwidth", bandwidth, n_stages - 1, "boundary of stages")
    shares = (1,) * n_stages if replicas is None else replicas
    if len(shares) != n_stages or min(shares) < 1:
        raise ValueError(
            f"replicas: expected one number of at least 1 per stage ({n_stages}), got {replicas}"
        )
    limits = _limits(memory_limit, n_stages)
    places = _places(profile, n_stages)
    costs = _Costs(profile, shares, paces, widths, weight_copies, window)

    def slowest(start: int, end: int, k: int) -> float:
        within = costs.memory(start, end, k) <= limits[k]
        return costs.seconds(start, end, k) if within else _NEVER

    best, _ = _search(places, n_stages, slowest, max)
    if best == _NEVER:
        raise ValueError(_too_little_memory(costs, places, limits, n_stages))

    def unevenness(start: int, end: int, k: int) -> float:
        seconds = slowest(start, end, k)
        return seconds**2 if seconds <= best else _NEVER

    _, ends = _search(places, n_stages, unevenness, lambda a, b: a + b)
    starts = (0, *ends[:-1])
    return Cut(
        ends,
        tuple(costs.estimate(s, e, k) for k, (s, e) in enumerate(zip(starts, ends, strict=True))),
    )


class _Costs:
    """Time and memory of any stage, each in O(1)."""

    def __init__(
        self,
        profile: Profile,
        replicas: Sequence[int],
        speeds: Sequence[float],
        bandwidths: Sequence[float] | None,
        weight_copies: int | StageCount,
        window: int | StageCount,
    ) -> None:
        blocks, n = profile.blocks, len(replicas)
        self._replicas, self._speeds = replicas, speeds
        self._seconds = [0.0, *accumulate(block.seconds for block in blocks)]
        self._parameters = [0, *accumulate(block.parameter_bytes for block in blocks)]
        self._saved = [0, *accumulate(block.saved_bytes for block in blocks)]
        # bytes that cross the place before each block; none before the first and after the last
        self._edges = [0, *(block.output_bytes for block in blocks[:-1]), 0]
        # of both edges of every stage
        inner = [0.0] * (n - 1) if bandwidths is None else [2.0 / width for width in bandwidths]
        self._per_byte = [0.0, *inner, 0.0]
        self._copies = _counts(weight_copies, n, "weight_copies")
        self._windows = _counts(window, n, "window")

    def transfer(self, start: int, end: int, k: int) -> float:
        before, after = self._per_byte[k : k + 2]
        return before * self._edges[start] + after * self._edges[end]

    def compute(self, start: int, end: int, k: int) -> float:
        seconds = self._seconds[end] - self._seconds[start]
        return seconds / self._replicas[k] / self._speeds[k]

    def seconds(self, start: int, end: int, k: int) -> float:
        return self.compute(start, end, k) + self.transfer(start, end, k)

    def memory(self, start: int, end: int, k: int) -> int:
        parameters = self._parameters[end] - self._parameters[start]
        saved = self._saved[end] - self._saved[start]
        return self._copies[k] * parameters + self._windows[k] * saved

    def estimate(self, start: int, end: int, k: int) -> StageEstimate:
        return StageEstimate(
            range(start, end),
            self.compute(start, end, k),
            self.transfer(start, end, k),
            self._parameters[end] - self._parameters[start],
            self.memory(start, end, k),
            self._speeds[k],
        )


def _search(
    places: list[int],
    n: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """Return the least joined cost of n stages, and their ends (the earliest of equal ones)."""
    last = len(places) - 1
    # least[q]: of the first k stages, ending at places[q]
    least = [0.0] + [_NEVER] * last
    choices: list[list[int]] = []
    for k in range(n):
        now = [_NEVER] * (last + 1)
        chosen = [0] * (last + 1)
        for q in range(k + 1, last + 1):
            for p in range(k, q):
                if least[p] == _NEVER:
                    continue
                joined = join(least[p], cost(places[p], places[q], k))
                if joined < now[q]:
                    now[q], chosen[q] = joined, p
        least = now
        choices.append(chosen)
    ends = []
    q = last
    for chosen in reversed(choices):
        ends.append(places[q])
        q = chosen[q]
    return least[last], tuple(reversed(ends))


def _places(profile: Profile, n: int) -> list[int]:
    """Block indices that a stage may begin or end at."""
    blocks = len(profile.blocks)
    for tie in profile.ties:
        if not 0 <= tie.first < tie.last < blocks:
            raise ValueError(
                f"profile: a tie between blocks {tie.first} and {tie.last} of {blocks}"
            )
    inner = [
        place
        for place in range(1, blocks)
        if not any(tie.first < place <= tie.last for tie in profile.ties)
    ]
    if len(inner) < n - 1:
        shared = "; ".join(tie.what for tie in profile.ties)
        raise ValueError(
            f"n_stages: {n} stages need {n - 1} places to cut, and blocks that share something "
            f"leave {len(inner)}: {shared}"
        )
    return [0, *inner, blocks]


def _limits(memory_limit: int | Sequence[int] | None, n: int) -> list[float]:
    if not isinstance(memory_limit, Sequence):
        return [_NEVER if memory_limit is None else memory_limit] * n
    if len(memory_limit) != n:
        raise ValueError(f"memory_limit: expected one per stage ({n}), got {len(memory_limit)}")
    return list(memory_limit)


def _counts(given: int | StageCount, n: int, name: str) -> list[int]:
    counts = [given(k, n) if callable(given) else given for k in range(n)]
    for k, count in enumerate(counts):
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count} for stage {k} of {n}")
    return counts


def _too_little_memory(costs: _Costs, places: list[int], limits: list[float], n: int) -> str:
    def needed(start: int, end: int, k: int) -> float:
        return costs.memory(start, end, k) / max(limits[k], 1)

    share, ends = _search(places, n, needed, max)
    return (
        f"memory_limit: no division into {n} stages keeps it; the one that comes closest (ends "
        f"{list(ends)}) has a stage that takes {100 * share:.0f} % of its limit"
    )


# A cut that a plan says.


class HasDocument(Protocol):
    """What ``spectrain_ext.planning`` has found."""

    def document(self) -> Mapping[str, Any]:
        """The content of its file."""


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """Where a plan cuts a model, and how it trains that."""

    model: str  # its class
    blocks: tuple[BlockProfile, ...]
    ends: tuple[int, ...]
    settings: Mapping[str, Any]  # keyword arguments of a pipeline

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def closed(self) -> tuple[Tie, ...]:
        """Ties that leave no other places."""
        inner = set(range(1, len(self.blocks))) - set(self.ends)
        return tuple(Tie(place - 1, place, "the plan") for place in sorted(inner))

    def check(self, names: Sequence[str], n_stages: int) -> None:
        """Raise ValueError if it is of a model of other blocks, or has other numbers of stages."""
        for index, (theirs, ours) in enumerate(zip_longest(self.names, names)):
            if theirs != ours:
                said, has = (
                    "nothing" if name is None else reprlib.repr(name) for name in (theirs, ours)
                )
                raise ValueError(
                    f"plan: it is of another model: at block {index} its "
                    f"{reprlib.repr(self.model)} of {len(self.blocks)} blocks has {said}, this one "
                    f"of {len(names)} has {has}"
                )
        if n_stages != len(self.ends):
            raise ValueError(
                f"n_stages: expected {len(self.ends)}, as the plan has, or none, got {n_stages}"
            )


def planned_cut(plan: str | os.PathLike[str] | Mapping[str, Any] | HasDocument) -> PlannedCut:
    """Read a plan's document or file; a ValueError names what is wrong with it."""
    where = "plan"
    if isinstance(plan, (str, os.PathLike)):
        where = f"plan: {os.fspath(plan)}"
        document = read_json(plan, _LARGEST)
    elif isinstance(plan, Mapping):
        document = plan
    elif hasattr(plan, "document"):
        document = plan.document()
    else:
        raise TypeError(
            f"plan: expected a file's name, a Plan or its document, got a {type(plan).__name__}"
        )
    try:
        return _planned(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{where}: expected one that spectrain plan has written: {what}"
        ) from error


def _planned(document: Mapping[str, Any]) -> PlannedCut:
    if document["spectrain_plan"] != PLAN_FORMAT:
        raise ValueError(
            f"spectrain_plan: expected format {PLAN_FORMAT}, got "
            f"{reprlib.repr(document['spectrain_plan'])}"
        )
    blocks = made_of(BlockProfile, document["blocks"], "blocks")
    if not blocks or not all(isinstance(block.name, str) for block in blocks):
        raise ValueError("blocks: expected some, with names")
    ends = tuple(document["ends"])
    if not (
        ends
        and all(type(end) is int for end in ends)
        and all(a < b for a, b in zip((0, *ends), ends, strict=False))
        and ends[-1] == len(blocks)
    ):
        raise ValueError(
            f"ends: expected ascending numbers, the last of them {len(blocks)} (the blocks), got "
            f"{reprlib.repr(document['ends'])}"
        )
    settings = dict(document["settings"])
    for name, value in settings.items():
        if not isinstance(value, _SETTINGS.get(name, ())) or isinstance(value, bool):
            raise ValueError(f"settings: {reprlib.repr(name)} cannot be {reprlib.repr(value)}")
    return PlannedCut(str(document["model"]), blocks, ends, settings)


_SETTINGS: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "microbatches": int,
    "window": str,
    "replicas": list,
}
