"""Plan: how to train a model on some devices, chosen by what every way to do it costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from spectrain_ext.files import finite, replace_file
from spectrain_ext.method import Method, chunks_of, find_method
from spectrain_ext.partitioning.profile import check_number
from spectrain_ext.schedule import Span, flushes

from .costs import Costs, Setting
from .layers import Layers, Link, find_link
from .search import Search

#: What is compared where nobody says: synchronous training, the others with and without prediction.
METHODS = (
    *("sync", "gpipe", "1f1b", "vanilla", "pipedream", "pipedream-2bw"),
    *("spectrain", "spectrain-stash", "auto"),
)
# A timeline shows as many minibatches, and two windows of them.
_SHOWN = 3


class Quality(NamedTuple):
    """What was measured of a method at a delay, against synchronous training.

    Attributes:
        low: the least gap of the test loss over workloads, after as many updates: 0.01 is 1 % more.
        high: the largest.
        where: the workloads with their stages, that of the largest gap first.
        updates: those to the loss that synchronous training has after three quarters of its own,
            over these; of the workload that needs most. Infinite: one did not get there.
    """

    low: float
    high: float
    where: tuple[str, ...]
    updates: float


SYNCHRONOUS = Quality(0.0, 0.0, (), 1.0)


@lru_cache
def measurements() -> tuple[dict[str, Any], ...]:
    """The rows of ``quality.json``: one per workload, method, stages and microbatches."""
    # Made of a study's results: docs/frontier.md says what was trained and how.
    text = (files(__package__) / "quality.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["rows"])


def expected(method: Method, stages: int, delay: int) -> Quality | None:
    """What is known of a method with this delay; None: it was not measured."""
    if flushes(method.schedule) or delay == 0:
        return SYNCHRONOUS
    nearest: dict[str, dict[str, Any]] = {}  # of each workload, by the number of stages
    for row in measurements():
        if row["method"] == method.name and row["delay"] == delay:
            known = nearest.get(row["workload"])
            if known is None or _far(row, stages) < _far(known, stages):
                nearest[row["workload"]] = row
    if not nearest:
        return None
    rows = sorted(nearest.values(), key=_gap, reverse=True)
    return Quality(
        _gap(rows[-1]),
        _gap(rows[0]),
        tuple(f"{row['workload']}, N = {row['stages']}" for row in rows),
        max(math.inf if row["updates"] is None else row["updates"] for row in rows),
    )


def _gap(row: dict[str, Any]) -> float:
    return math.inf if row["gap"] is None else float(row["gap"])


def _far(row: dict[str, Any], stages: int) -> float:
    return abs(math.log(row["stages"] / stages))


@dataclass(frozen=True)
class Candidate:
    """One way to train, and what it comes to.

    Attributes:
        method: its name.
        ends: of every stage, the index after its last block.
        replicas: of every stage.
        microbatches: of a minibatch.
        window: None, the method's own, or ``"wide"``.
        period: seconds of a minibatch and its update, simulated.
        bound: what no simulation can be below.
        throughput: samples per second, simulated.
        memory: bytes of a device of every stage, counted.
        delay: the most updates that a forward is late, counted.
        quality: what this delay cost the method elsewhere, measured; None: it was not.
    """

    method: str
    ends: tuple[int, ...]
    replicas: tuple[int, ...]
    microbatches: int
    window: str | None
    period: float
    bound: float
    throughput: float
    memory: tuple[int, ...]
    delay: int
    quality: Quality | None

    @property
    def stages(self) -> int:
        """Their number."""
        return len(self.ends)

    @property
    def seconds_to_quality(self) -> float:
        """The period times the updates to a loss over those of synchronous training.

        Infinite: it did not get there, or was not measured.
        """
        return math.inf if self.quality is None else self.period * self.quality.updates

    @property
    def code(self) -> str:
        """The call that trains so, on every rank."""
        said = [f"method={self.method!r}", f"microbatches={self.microbatches}"]
        if self.window is not None:
            said.append(f"window={self.window!r}")
        if set(self.replicas) != {1}:
            even = len(set(self.replicas)) == 1
            said.append(f"replicas={self.replicas[0] if even else list(self.replicas)}")
        return f"st.DistributedPipeline(stage, optimizer, loss_fn, {', '.join(said)})"


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        devices: how many there are.
        batch: samples of a minibatch.
        link: between any two devices.
        candidates: of every method the fastest way, and the soonest at synchronous training's loss
            where that is another: those with the shortest period first.
        tried: ways that were looked at.
        simulated: of these, how many periods were simulated.
        left_out: ways that take more memory than a device has.
        least_memory: of these, what the smallest takes.
        assumptions: what was neither measured nor counted, in words.
    """

    devices: int
    batch: int
    link: Link
    candidates: tuple[Candidate, ...]
    tried: int
    simulated: int
    left_out: int
    least_memory: float
    assumptions: tuple[str, ...]
    _costs: tuple[Costs, ...]

    @property
    def fastest(self) -> Candidate:
        """With the most samples per second."""
        return self.candidates[0]

    @property
    def soonest(self) -> Candidate:
        """With the least time to synchronous training's loss, by what was measured elsewhere."""
        return min(self.candidates, key=lambda c: (c.seconds_to_quality, c.period))

    def spans(self, candidate: Candidate) -> Iterator[Span]:
        """The timeline of one of the candidates, simulated."""
        costs = self._costs[self.candidates.index(candidate)]
        return costs.spans(_SHOWN + 2 * costs.rounds)


def plan(
    layers: Layers,
    devices: int,
    *,
    link: str | float | Link,
    batch: int,
    memory: float | None = None,
    speed: float | None = None,
    cores: int | None = None,
    methods: Sequence[str | Method] = METHODS,
    state: int = 1,
) -> Plan:
    """Find how to train a model on some devices.

    Every number of stages, of replicas and of microbatches, both windows and all methods are
    compared; where there are more divisions into stages than a few, the one whose slowest stage is
    fastest. A bound on the period leaves out what cannot be best, and the rest is simulated.

    Args:
        layers: of ``measure_layers`` or ``read_layers``.
        devices: how many; all are used.
        link: between any two of them: a name in ``LINKS``, bytes per second, or a ``Link``.
        batch: samples of a minibatch, over all devices.
        memory: bytes of a device; None: not limited.
        speed: devices compute so many times as fast as what was measured; None: like it.
        cores: that all devices share, as processes on one machine do; None: each has its own.
        methods: that are compared; ``"sync"`` is data parallelism, in one stage.
        state: bytes of optimizer state per byte of parameters: 1 for SGD's momentum, 2 for Adam.

    Raises:
        ValueError: an argument is out of range, or no way fits.
    """
    found_link = find_link(link)
    for name, value in (("devices", devices), ("batch", batch), ("cores", cores)):
        if value is not None:
            check_number(name, value, least=1)
    check_number("state", state)
    if memory is not None and not memory > 0:
        raise ValueError(f"memory: expected a positive number of bytes, got {memory}")
    made = [find_method(method) for method in methods]
    if not made:
        raise ValueError("methods: expected at least one")
    for method in made:
        if (chunks := chunks_of(method)) > 1:
            raise ValueError(
                f"methods: {method.name!r} has {chunks} stages per device, a plan has one"
            )
    scaled = layers if speed is None else layers.faster(speed)
    setting = Setting(scaled, found_link, batch, cores, state)
    search = Search(setting, devices, made, memory)
    ways: dict[int, Costs] = {}
    for method in made:
        for price in (lambda costs: 1.0, _price):
            costs = search.best(method, price)
            if costs is not None:
                ways[id(costs)] = costs
    if not ways:
        raise ValueError(_nothing(search, devices, batch, memory)) from search.refusal
    chosen = sorted(ways.values(), key=lambda costs: (costs.period, costs.delay))
    return Plan(
        devices,
        batch,
        found_link,
        tuple(_candidate(costs, batch) for costs in chosen),
        search.tried,
        search.simulated,
        search.left_out,
        search.least_memory,
        tuple(_assumptions(layers, found_link, speed, cores)),
        tuple(chosen),
    )


def _quality(costs: Costs) -> Quality | None:
    return expected(costs.way.method, len(costs.way.ends), costs.delay)


def _price(costs: Costs) -> float:
    quality = _quality(costs)
    return math.inf if quality is None else quality.updates


def _candidate(costs: Costs, batch: int) -> Candidate:
    way = costs.way
    return Candidate(
        way.method.name,
        way.ends,
        way.replicas,
        way.microbatches,
        None if way.window is None else str(way.window),
        costs.period,
        costs.bound,
        batch / costs.period if costs.period else math.inf,
        costs.memory,
        costs.delay,
        _quality(costs),
    )


def _assumptions(layers: Layers, link: Link, speed: float | None, cores: int | None) -> list[str]:
    where = ", ".join(f"{key} {value}" for key, value in layers.about.items())
    said = [f"layer times are measured ({where or 'as the profile says'})"]
    if speed is not None:
        said.append(f"ASSUMED: devices compute {speed:g} times as fast as that, every layer alike")
    source = "" if "measured" in link.name else ": published or given, not measured"
    said.append(
        f"link {link.name}: {link.bandwidth / 1e9:.4g} GB/s a direction, "
        f"{1e6 * link.latency:.4g} us{source}"
    )
    if cores is not None:
        said.append(f"all devices share {cores} cores")
    said.append("periods and throughput are simulated; memory and delay are counted")
    said.append("quality is what other workloads of docs/frontier.md lost at that delay: measured")
    return said


def _nothing(search: Search, devices: int, batch: int, memory: float | None) -> str:
    if search.left_out:
        return (
            f"memory: all {search.left_out} ways that were looked at take more than {memory:g} "
            f"bytes a device; the smallest takes {search.least_memory:.4g}"
        )
    if search.refusal is not None:
        return str(search.refusal)
    if devices == 1:
        return "devices: one trains by 'sync' only, which is not among the methods"
    return (
        f"batch: {batch} samples cannot be dealt out to {devices} devices, in any number of stages "
        "that the model's blocks allow; replicas divide the samples of a minibatch"
    )


def write_plan(path: Path, plan: Plan) -> None:
    """Write what was found as JSON; what is not finite becomes null."""
    document: Mapping[str, Any] = {
        "devices": plan.devices,
        "batch": plan.batch,
        "link": asdict(plan.link),
        "assumptions": plan.assumptions,
        "tried": plan.tried,
        "simulated": plan.simulated,
        "left_out": plan.left_out,
        "candidates": [
            {
                **asdict(candidate),
                "quality": None if candidate.quality is None else candidate.quality._asdict(),
                "seconds_to_quality": candidate.seconds_to_quality,
                "code": candidate.code,
            }
            for candidate in plan.candidates
        ],
    }
    replace_file(path, f"{json.dumps(finite(document), indent=1, allow_nan=False)}\n".encode())
