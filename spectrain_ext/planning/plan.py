"""Plan: how to train a model on some devices, chosen by what every way to do it costs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from spectrain_ext.codecs import Codec, Codecs, codecs_of
from spectrain_ext.files import finite, replace_file
from spectrain_ext.method import Method, chunks_of, find_method
from spectrain_ext.partitioning.cut import PLAN_FORMAT
from spectrain_ext.partitioning.profile import check_number, one_each
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
        where: the workloads with their stages and delays, that which needs most updates first.
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
    mine = [row for row in measurements() if row["method"] == method.name]
    # Where this delay was not measured: what a smaller one did not reach, it does not either.
    missed = (row for row in mine if row["delay"] < delay and row["updates"] is None)
    nearest: dict[str, dict[str, Any]] = {}  # of each workload, by the number of stages
    for row in [row for row in mine if row["delay"] == delay] or missed:
        known = nearest.get(row["workload"])
        if known is None or _far(row, stages) < _far(known, stages):
            nearest[row["workload"]] = row
    if not nearest:
        return None
    rows = sorted(nearest.values(), key=lambda row: (_updates(row), _gap(row)), reverse=True)
    gaps = [_gap(row) for row in rows]
    return Quality(
        min(gaps),
        max(gaps),
        tuple(f"{row['workload']}, N = {row['stages']}, delay {row['delay']}" for row in rows),
        _updates(rows[0]),
    )


def _gap(row: dict[str, Any]) -> float:
    return math.inf if row["gap"] is None else float(row["gap"])


def _updates(row: dict[str, Any]) -> float:
    return math.inf if row["updates"] is None else float(row["updates"])


def _far(row: dict[str, Any], stages: int) -> float:
    return abs(math.log(row["stages"] / stages))


@dataclass(frozen=True)
class Candidate:
    """One way to train, and what it comes to.

    Attributes:
        method: its name.
        ends: of every stage, the index after its last block.
        split_points: names of the blocks that stages but the first begin with.
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
    split_points: tuple[str, ...]
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
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of a pipeline; ``replicas`` are a ``DistributedPipeline``'s only."""
        found: dict[str, Any] = {"method": self.method, "microbatches": self.microbatches}
        if self.window is not None:
            found["window"] = self.window
        if set(self.replicas) != {1}:
            found["replicas"] = list(self.replicas)
        return found

    @property
    def code(self) -> str:
        """The call that trains so, on every rank."""
        said = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"st.DistributedPipeline(stage, optimizer, loss_fn, {said})"

    @property
    def _place(self) -> tuple[Any, ...]:
        """Where it is ranked: what was measured, then what was not, then what did not get there."""
        soon = self.seconds_to_quality
        missed = math.isinf(soon) and self.quality is not None
        return math.isinf(soon), missed, soon, self.period, self.delay, max(self.memory)


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        devices: how many there are.
        batch: samples of a minibatch.
        links: between each two neighbours; a single one is between any two devices.
        candidates: of every method the fastest way, and the soonest at synchronous training's loss
            where that is another. Ranked by the time to that loss; those for which it was not
            measured follow, and last come those that did not get there.
        tried: ways that were looked at.
        simulated: of these, how many periods were simulated.
        left_out: ways that take more memory than a device has.
        least_memory: of these, what the smallest takes of its fullest device.
        assumptions: what was neither measured nor counted, in words.
        speeds: of each device, over what was measured; None: all alike.
        memory: bytes of each device; None: not limited.
    """

    devices: int
    batch: int
    links: tuple[Link, ...]
    candidates: tuple[Candidate, ...]
    tried: int
    simulated: int
    left_out: int
    least_memory: float
    assumptions: tuple[str, ...]
    speeds: tuple[float, ...] | None
    memory: tuple[float, ...] | None
    _costs: tuple[Costs, ...]

    @property
    def fastest(self) -> Candidate:
        """With the most samples per second, whatever becomes of the loss."""
        return min(self.candidates, key=lambda candidate: candidate.period)

    @property
    def soonest(self) -> Candidate:
        """The first: with the least time to synchronous training's loss, as measured elsewhere."""
        return self.candidates[0]

    def document(self, candidate: Candidate | None = None) -> dict[str, Any]:
        """What its file holds, for ``partition``; what is not finite is None.

        Args:
            candidate: the one by which a model is cut and trained; None: the first.
        """
        chosen = self.candidates[0] if candidate is None else candidate
        costs = self._costs[self.candidates.index(chosen)]
        candidates = [
            {
                **asdict(each),
                "quality": None if each.quality is None else each.quality._asdict(),
                "seconds_to_quality": each.seconds_to_quality,
                "code": each.code,
            }
            for each in self.candidates
        ]
        links = [asdict(link) for link in self.links]
        found = {
            "spectrain_plan": PLAN_FORMAT,
            "model": str(costs.setting.layers.about.get("model", "")),
            "blocks": [asdict(block) for block in costs.blocks],  # for one of its microbatches
            **{name: getattr(chosen, name) for name in ("ends", "split_points", "settings")},
            **{name: getattr(self, name) for name in ("devices", "batch", "assumptions")},
            **{name: getattr(self, name) for name in ("tried", "simulated", "left_out")},
            **{name: getattr(self, name) for name in ("speeds", "memory")},
            "link": links[0] if len(links) == 1 else links,
            "candidates": candidates,
        }
        document: dict[str, Any] = finite(found)
        return document

    def spans(self, candidate: Candidate) -> Iterator[Span]:
        """The timeline of one of the candidates, simulated."""
        costs = self._costs[self.candidates.index(candidate)]
        return costs.spans(_SHOWN + 2 * costs.rounds)


def plan(
    layers: Layers,
    devices: int,
    *,
    link: str | float | Link | Sequence[str | float | Link],
    batch: int,
    memory: float | Sequence[float] | None = None,
    speed: float | None = None,
    speeds: Sequence[float] | None = None,
    replicas: int | None = None,
    cores: int | None = None,
    methods: Sequence[str | Method] = METHODS,
    state: int = 1,
    codec: Codec | Codecs | None = None,
) -> Plan:
    """Find how to train a model on some devices.

    Every number of stages, of replicas and of microbatches, both windows and all methods are
    compared; where there are more divisions into stages than a few, the one whose slowest stage is
    fastest. A bound on the period leaves out what cannot be best, and the rest is simulated.

    Devices may be unequal. They are in the order of ranks, stage by stage, which is yours: none is
    put in another's place. Replicas take as many microbatches each, so that of a stage's devices
    the slowest counts, and the one with the least memory. A message takes as long as by the slowest
    link from the first device of its stage to the last of the next, and a sum over replicas as by
    the slowest between them.

    Args:
        layers: of ``measure_layers`` or ``read_layers``.
        devices: how many; all are used.
        link: between any two of them: a name in ``LINKS``, bytes per second, or a ``Link``; or one
            of these for each two neighbours, ``devices - 1``.
        batch: samples of a minibatch, over all devices.
        memory: bytes of a device, or one number for each; None: not limited.
        speed: devices compute so many times as fast as what was measured; None: like it.
        speeds: the same, one number for each device.
        replicas: of a stage at most so many; None: any number. With 1 it is a plan for a
            ``Pipeline`` in one process.
        cores: that all devices share, as processes on one machine do; None: each has its own.
        methods: that are compared; ``"sync"`` is data parallelism, in one stage.
        state: bytes of optimizer state per byte of parameters: 1 for SGD's momentum, 2 for Adam.
        codec: as for a pipeline, of what stages send one another.

    Raises:
        ValueError: an argument is out of range, or no way fits.
        TypeError: what is no codec.
    """
    codecs = codecs_of(codec)
    numbers = {"devices": devices, "batch": batch, "replicas": replicas, "cores": cores}
    for name, value in numbers.items():
        if value is not None:
            check_number(name, value, least=1)
    check_number("state", state)
    if isinstance(link, (str, float, int, Link)):
        links: tuple[Link, ...] = (find_link(link),)
    elif len(link) == devices - 1:
        links = tuple(map(find_link, link))
    else:
        raise ValueError(
            f"link: expected one, or one between each two neighbours of the {devices} devices "
            f"({devices - 1}), got {len(link)}"
        )
    if len({one.inbound for one in links}) > 1:
        raise ValueError("link: expected one inbound wire at every device or at none, got both")
    if speed is not None and speeds is not None:
        raise ValueError("speed: it contradicts speeds; give one of the two")
    paces = None if speeds is None else one_each("speeds", speeds, devices, "device")
    limits = None if memory is None else one_each("memory", memory, devices, "device")
    blocks = len(layers.profiles[0].blocks)
    if replicas is not None and replicas * blocks < devices:
        raise ValueError(
            f"replicas: {replicas} of each of at most {blocks} stages leave some of the {devices} "
            "devices idle"
        )
    made = [find_method(method) for method in methods]
    if not made:
        raise ValueError("methods: expected at least one")
    for method in made:
        if (chunks := chunks_of(method)) > 1:
            raise ValueError(
                f"methods: {method.name!r} has {chunks} stages per device, a plan has one"
            )
    scaled = layers if speed is None else layers.faster(speed)
    setting = Setting(scaled, links, batch, cores, state, paces, codecs)
    search = Search(setting, devices, made, limits, replicas)
    ways: dict[int, Costs] = {}
    for method in made:
        for price in (lambda costs: 1.0, _price):
            costs = search.best(method, price)
            if costs is not None:
                ways[id(costs)] = costs
    if not ways:
        raise ValueError(_nothing(search, devices, batch)) from search.refusal
    chosen = sorted(
        ((_candidate(costs), costs) for costs in ways.values()), key=lambda pair: pair[0]._place
    )
    return Plan(
        devices,
        batch,
        links,
        tuple(candidate for candidate, _ in chosen),
        search.tried,
        search.simulated,
        search.left_out,
        search.closest[0],
        tuple(
            _assumptions(layers, links, paces if speed is None else (speed,), limits, cores, codec)
        ),
        paces,
        limits,
        tuple(costs for _, costs in chosen),
    )


def _quality(costs: Costs) -> Quality | None:
    return expected(costs.way.method, len(costs.way.ends), costs.delay)


def _price(costs: Costs) -> float:
    quality = _quality(costs)
    return math.inf if quality is None else quality.updates


def _candidate(costs: Costs) -> Candidate:
    way, batch = costs.way, costs.setting.batch
    return Candidate(
        way.method.name,
        way.ends,
        tuple(costs.blocks[end].name for end in way.ends[:-1]),
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


def _in_order(values: Sequence[object]) -> str:
    """Values of devices, equal neighbours together: "2 x 24, 80"."""
    runs = [(len([*group]), value) for value, group in groupby(values)]
    return ", ".join(f"{count} x {value}" if count > 1 else f"{value}" for count, value in runs)


def _assumptions(
    layers: Layers,
    links: tuple[Link, ...],
    speeds: tuple[float, ...] | None,
    memory: tuple[float, ...] | None,
    cores: int | None,
    codec: object,
) -> list[str]:
    where = ", ".join(f"{key} {value}" for key, value in layers.about.items())
    said = [f"layer times are measured ({where or 'as the profile says'})"]
    if speeds is not None:
        each = _in_order([f"{number:g}" for number in speeds])
        said.append(f"ASSUMED: devices compute {each} times as fast as that, every layer alike")
    if memory is not None and len(set(memory)) > 1:
        said.append(f"devices have {_in_order([f'{size / 1e9:.4g}' for size in memory])} GB")
    if len(links) > 1:
        said.append(f"links from device to device: {_in_order([link.name for link in links])}")
    for link in dict.fromkeys(links):
        source = "" if "measured" in link.name else ": published or given, not measured"
        said.append(
            f"link {link.name}: {link.bandwidth / 1e9:.4g} GB/s "
            f"{'into a device' if link.inbound else 'a direction'}, "
            f"{1e6 * link.latency:.4g} us{source}"
        )
    if codec is not None:
        said.append(
            f"ASSUMED: codec={codec!r} packs float32 messages, in no time, at no cost to the loss"
        )
    if cores is not None:
        said.append(f"all devices share {cores} cores")
    said.append("periods and throughput are simulated; memory and delay are counted")
    said.append(
        "ranked by ms x minibatches; minibatches to a loss are those of synchronous training (1) "
        "times what was measured on other workloads at that delay, of which the worst counts: "
        "docs/frontier.md"
    )
    return said


def _nothing(search: Search, devices: int, batch: int) -> str:
    if search.left_out:
        needed, given = search.closest
        return (
            f"memory: all {search.left_out} ways that were looked at take more than {given:g} "
            f"bytes a device; the smallest takes {needed:.4g}"
        )
    if search.refusal is not None:
        return str(search.refusal)
    if devices == 1:
        return "devices: one trains by 'sync' only, which is not among the methods"
    return (
        f"batch: {batch} samples cannot be dealt out to {devices} devices, in any number of stages "
        "that the model's blocks allow; replicas divide the samples of a minibatch"
    )


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write what ``Plan.document`` says as JSON."""
    text = json.dumps(plan.document(), indent=1, allow_nan=False)
    replace_file(Path(path), f"{text}\n".encode())
