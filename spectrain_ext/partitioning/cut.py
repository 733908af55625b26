"""Divides a sequence of blocks so that the slowest stage is as fast as possible."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral

from spectrain_ext.errors import one_each

from .profile import Profile

#: What to do about something that blocks share.
REMEDY = (
    "give each its own; partition copies buffers if an example_input shows that no forward writes "
    "to them"
)


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """The estimated cost of one stage, from a profile."""

    blocks: range
    compute_seconds: float  # forward and backward of one microbatch, by replicas and speed
    transfer_seconds: float  # activations and gradients over both edges; 0 without a bandwidth
    memory_bytes: int  # all copies of the parameters, and the saved tensors of the window
    speed: float  # how many times as fast as the measured device the stage's devices are
    modules: str  # the names of the first and the last block, or of the only one

    @property
    def seconds(self) -> float:
        """Compute and transfer, one after the other."""
        return self.compute_seconds + self.transfer_seconds


@dataclass(frozen=True, slots=True)
class Division:
    """A division of blocks into stages; ``print`` shows it as a table.

    Attributes:
        ends: per stage, the index after its last block.
        stages: an estimate per stage.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        >>> found = st.partition(model, 2, torch.ones(4, 8), profile="parameters").cut
        >>> found.ends, found.bottleneck, found.balance
        ((1, 3), 1, 0.75)
    """

    ends: tuple[int, ...]
    stages: tuple[StageEstimate, ...]

    @property
    def bottleneck(self) -> int:
        """Index of the slowest stage, the first of equal ones."""
        return max(range(len(self.stages)), key=lambda k: (self.stages[k].seconds, -k))

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return self.stages[self.bottleneck].seconds

    @property
    def balance(self) -> float:
        """Mean time of the stages divided by the slowest one's; 1 if all are equal."""
        slowest = self.slowest
        total = sum(stage.seconds for stage in self.stages)
        return total / len(self.stages) / slowest if slowest else 1.0

    def __str__(self) -> str:
        unequal = any(stage.speed != 1 for stage in self.stages)
        named = any(stage.modules for stage in self.stages)
        heading = f"{'stage':>5} {'blocks':>9} {'ms':>9} {'transfer':>9} {'MiB':>9}"
        rows = [heading + f" {'speed':>9}" * unequal + "  modules" * named]
        for k, stage in enumerate(self.stages):
            blocks = f"{stage.blocks.start}..{stage.blocks.stop - 1}"
            rows.append(
                f"{k:>5} {blocks:>9} {1e3 * stage.compute_seconds:>9.3f} "
                f"{1e3 * stage.transfer_seconds:>9.3f} {stage.memory_bytes / 2**20:>9.1f}"
                + f" {stage.speed:>9.4g}" * unequal
                + f"  {stage.modules}" * named
            )
        rows.append(f"slowest: stage {self.bottleneck}; balance {100 * self.balance:.0f} %")
        return "\n".join(rows)


def cut(
    profile: Profile,
    n_stages: int,
    *,
    speeds: Sequence[float] | None = None,
    bandwidth: float | Sequence[float] | None = None,
    memory_limit: int | Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
) -> Division:
    """Return the division with the fastest slowest stage; of equal ones, the most even.

    A stage's time is that of its blocks divided by its speed and replicas, plus, with a
    ``bandwidth``, the transfer over both edges: an activation one way and a gradient of the same
    size back. Its memory is four times its parameters, for true weights, working weights, gradients
    and momentum, plus the saved tensors of its blocks for the ``n_stages - k`` microbatches in
    flight under 1F1B. The search is exact, by dynamic programming in ``O(n_stages * blocks**2)``.

    Args:
        profile: from ``measure``, or made by hand.
        n_stages: at least 1.
        speeds: per stage, how many times as fast as the measured device its devices are; None: 1.
        bandwidth: bytes per second between neighbouring stages, or one number per boundary. None:
            transfers cost nothing, as when they overlap with computation.
        memory_limit: bytes per stage, one number for all or one each.
        replicas: number of replicas of each stage, which share its microbatches; None: 1.

    Raises:
        ValueError: an argument out of range, too few places to cut (the message names what the
            blocks share), or a memory limit that no division meets.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        >>> profile = st.partition(model, 1, torch.ones(4, 8), profile="parameters").profile
        >>> st.partitioning.cut(profile, 2).ends
        (2, 4)
    """
    check_stages(n_stages, len(profile.blocks))
    paces = one_each("speeds", 1.0 if speeds is None else speeds, n_stages, "stage")
    widths: Sequence[float] = [math.inf] * (n_stages - 1)
    if bandwidth is not None:
        widths = one_each("bandwidth", bandwidth, n_stages - 1, "boundary of stages")
    shares = one_each("replicas", 1 if replicas is None else replicas, n_stages, "stage")
    limits: Sequence[float] = [math.inf] * n_stages
    if memory_limit is not None:
        limits = one_each("memory_limit", memory_limit, n_stages, "stage")
    places = _places(profile, n_stages)
    blocks = profile.blocks
    seconds = [0.0, *accumulate(block.seconds for block in blocks)]
    parameters = [0, *accumulate(block.parameter_bytes for block in blocks)]
    saved = [0, *accumulate(block.saved_bytes for block in blocks)]
    # bytes that cross the boundary before each block, and after the last
    edges = [0, *(block.output_bytes for block in blocks[:-1]), 0]
    # seconds per byte of the edges before and after every stage
    per_byte = [0.0, *(2.0 / width for width in widths), 0.0]

    def compute(start: int, end: int, k: int) -> float:
        return (seconds[end] - seconds[start]) / shares[k] / paces[k]

    def transfer(start: int, end: int, k: int) -> float:
        return per_byte[k] * edges[start] + per_byte[k + 1] * edges[end]

    def memory(start: int, end: int, k: int) -> int:
        in_flight = (n_stages - k) * (saved[end] - saved[start])
        return 4 * (parameters[end] - parameters[start]) + in_flight

    def slowest(start: int, end: int, k: int) -> float:
        if memory(start, end, k) > limits[k]:
            return math.inf
        return compute(start, end, k) + transfer(start, end, k)

    best, _ = _search(places, n_stages, slowest, max)
    if best == math.inf:

        def share(start: int, end: int, k: int) -> float:
            return memory(start, end, k) / max(limits[k], 1)

        least, ends = _search(places, n_stages, share, max)
        raise ValueError(
            f"memory_limit: no division into {n_stages} stages keeps it; the one that comes "
            f"closest (ends {list(ends)}) has a stage that takes {100 * least:.0f} % of its limit"
        )

    def unevenness(start: int, end: int, k: int) -> float:
        time = slowest(start, end, k)
        return time**2 if time <= best else math.inf

    _, ends = _search(places, n_stages, unevenness, operator.add)
    stages = []
    for k, stage in enumerate(pairwise((0, *ends))):
        names = dict.fromkeys((blocks[stage[0]].name, blocks[stage[1] - 1].name))
        stages.append(
            StageEstimate(
                range(*stage),
                compute(*stage, k),
                transfer(*stage, k),
                memory(*stage, k),
                paces[k],
                " to ".join(filter(None, names)),
            )
        )
    return Division(ends, tuple(stages))


def check_stages(n_stages: int, blocks: int) -> None:
    if not 1 <= n_stages <= blocks:
        raise ValueError(f"n_stages: expected 1 to {blocks} (the blocks), got {n_stages}")


def check_ends(ends: Sequence[int], blocks: int) -> None:
    whole = all(isinstance(end, Integral) and end is not True for end in ends)
    ascending = whole and all(a < b for a, b in pairwise((0, *ends)))
    if not (ends and ascending and ends[-1] == blocks):
        raise ValueError(
            f"ends: expected ascending numbers, the last of them {blocks} (the blocks), got "
            f"{reprlib.repr(list(ends))}"
        )


def _search(
    places: list[int],
    n: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """Return the least joined cost of n stages, and their ends (the earliest of equal ones)."""
    last = len(places) - 1
    # least[q]: cost of the first k stages if they end at places[q]
    least = [0.0] + [math.inf] * last
    choices: list[list[int]] = []
    for k in range(n):
        now = [math.inf] * (last + 1)
        chosen = [0] * (last + 1)
        for q in range(k + 1, last + 1):
            for p in range(k, q):
                if least[p] == math.inf:
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


def open_places(profile: Profile) -> list[int]:
    """Return the blocks before which a profile's ties allow a cut."""
    return [
        index
        for index in range(1, len(profile.blocks))
        if not any(tie.first < index <= tie.last for tie in profile.ties)
    ]


def _places(profile: Profile, n: int) -> list[int]:
    blocks = len(profile.blocks)
    for tie in profile.ties:
        if not 0 <= tie.first < tie.last < blocks:
            raise ValueError(
                f"profile: a tie between blocks {tie.first} and {tie.last} of {blocks}"
            )
    inner = open_places(profile)
    if len(inner) < n - 1:
        shared = "; ".join(tie.what for tie in profile.ties)
        raise ValueError(
            f"n_stages: {n} stages need {n - 1} places to cut, and blocks that share something "
            f"leave {len(inner)}: {shared}; {REMEDY}"
        )
    return [0, *inner, blocks]
