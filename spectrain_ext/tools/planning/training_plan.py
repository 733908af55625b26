"""Plans how to train a model on some devices, by the costs of all ways to do it."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from spectrain_ext.errors import check_number, one_each
from spectrain_ext.files import finite, replace_file
from spectrain_ext.method import Method, MethodName, find_method
from spectrain_ext.passes.codecs import Codec, Codecs, codecs_of
from spectrain_ext.schedule import flushes

from .applied import PLAN_FORMAT
from .costs import Costs, Setting
from .layers import Layers, Link, find_link
from .search import Search

#: Compared by default: synchronous training, and others with and without prediction.
METHODS = (
    *("sync", "gpipe", "1f1b", "vanilla", "pipedream", "pipedream-2bw"),
    *("spectrain", "spectrain-stash", "auto"),
)


#: The CPU's time for an instruction of ``auto`` beside the calls of the modules, on one H200
#: (2026-11-26, torch 2.11; docs/benchmarks.md): four stages, one process.
HOST_SECONDS = 310e-6


class Quality(NamedTuple):
    """Measurements of a method at a delay, against synchronous training."""

    #: The smallest and the largest relative gap of the test loss over workloads, after as many
    #: updates: 0.01 is 1 % more.
    low: float
    high: float
    where: tuple[str, ...]  # workloads, stages and delays; the one that needs most updates first
    #: Updates to the loss that synchronous training has after three quarters of its own, over
    #: these; for the workload that needs most. Infinite: a workload did not reach it.
    updates: float


SYNCHRONOUS = Quality(0.0, 0.0, (), 1.0)


@lru_cache
def measurements() -> tuple[dict[str, Any], ...]:
    # From a study's results; docs/frontier.md describes it.
    text = (files(__package__) / "quality.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    for row in rows:
        row.update((name, math.inf) for name in ("gap", "updates") if row[name] is None)
    return tuple(rows)


def expected(method: Method, stages: int, delay: int) -> Quality | None:
    """Return what was measured of a method with this delay; None: nothing."""
    if flushes(method.schedule) or delay == 0:
        return SYNCHRONOUS
    mine = [row for row in measurements() if row["method"] == method.name]
    # Not measured at this delay: a loss not reached at a smaller delay is not reached either.
    missed = (row for row in mine if row["delay"] < delay and row["updates"] == math.inf)
    nearest: dict[str, dict[str, Any]] = {}  # of each workload, by the number of stages
    for row in [row for row in mine if row["delay"] == delay] or missed:
        both = nearest.get(row["workload"], row), row
        nearest[row["workload"]] = min(both, key=lambda r: abs(math.log(r["stages"] / stages)))
    if not nearest:
        return None
    rows = sorted(nearest.values(), key=lambda row: (row["updates"], row["gap"]), reverse=True)
    gaps = [row["gap"] for row in rows]
    return Quality(
        min(gaps),
        max(gaps),
        tuple(f"{row['workload']}, N = {row['stages']}, delay {row['delay']}" for row in rows),
        rows[0]["updates"],
    )


@dataclass(frozen=True)
class Candidate:
    """One way to train, with its costs; ``plan`` makes it.

    Attributes:
        method: its name.
        ends: for every stage, the index after its last block.
        split_points: the names of the blocks that stages begin with, without the first stage.
        replicas: of every stage.
        microbatches: per minibatch.
        window: None, the method's own, or ``"wide"``.
        period: simulated seconds per minibatch with its update.
        throughput: simulated samples per second.
        memory: bytes per device of each stage, counted.
        delay: the most updates between a forward and its backward, counted.
        quality: measurements of the method at this delay; None: none.
        limited_by_calls: the stages whose forward or backward takes less time than ``host``.
        seconds_of_calls: the CPU's per minibatch, if one process issues all instructions.

    Example:
        >>> from spectrain_ext.tools.planning import measure_layers, plan
        >>> layers = measure_layers([nn.Linear(8, 8), nn.Linear(8, 2)], torch.ones(4, 8))
        >>> best = plan(layers, 2, link="nvlink", batch=4, methods=["1f1b"], replicas=1).soonest
        >>> best.method, best.ends, best.replicas, best.delay
        ('1f1b', (1, 2), (1, 1), 0)
    """

    method: str
    ends: tuple[int, ...]
    split_points: tuple[str, ...]
    replicas: tuple[int, ...]
    microbatches: int
    window: str | None
    period: float
    throughput: float
    memory: tuple[int, ...]
    delay: int
    quality: Quality | None
    limited_by_calls: tuple[int, ...] = ()
    seconds_of_calls: float = 0.0

    @property
    def stages(self) -> int:
        return len(self.ends)

    @property
    def seconds_to_quality(self) -> float:
        """The period times ``quality.updates``; infinite if not reached or not measured."""
        return math.inf if self.quality is None else self.period * self.quality.updates

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of a pipeline; only ``DistributedPipeline`` takes ``replicas``."""
        settings: dict[str, Any] = {"method": self.method, "microbatches": self.microbatches}
        if self.window is not None:
            settings["window"] = self.window
        if set(self.replicas) != {1}:
            settings["replicas"] = list(self.replicas)
        return settings

    @property
    def code(self) -> str:
        """The call on every rank, as Python code."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"st.DistributedPipeline(stage, optimizer, loss_fn, {arguments})"

    @property
    def _rank(self) -> tuple[Any, ...]:
        """The sort key: measured ones, then those not measured, then those that did not reach."""
        soon = self.seconds_to_quality
        missed = math.isinf(soon) and self.quality is not None
        return math.isinf(soon), missed, soon, self.period, self.delay, max(self.memory)


@dataclass(frozen=True)
class TrainingPlan:
    """The result of ``plan``.

    Attributes:
        devices: their number.
        batch: samples per minibatch.
        links: between each two neighbours; a single one is between any two devices.
        candidates: every method's fastest way, and its soonest to synchronous training's loss if
            that is another. They are ranked by the time to that loss; then come those that were not
            measured, then those that did not reach it.
        tried: ways compared.
        simulated: ways simulated.
        left_out: ways that need more memory than a device has.
        least_memory: bytes that the smallest of these needs on its fullest device.
        assumptions: what was neither measured nor counted, in words.
        speeds: of each device, relative to the measured one; None: 1.
        memory: bytes of each device; None: no limit.

    Example:
        >>> from spectrain_ext.tools.planning import measure_layers, plan
        >>> layers = measure_layers([nn.Linear(8, 8), nn.Linear(8, 2)], torch.ones(4, 8))
        >>> found = plan(layers, 2, link="nvlink", batch=4, methods=["1f1b"], replicas=1)
        >>> found.soonest.code
        "st.DistributedPipeline(stage, optimizer, loss_fn, method='1f1b', microbatches=...)"
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
    _layers: Layers

    @property
    def fastest(self) -> Candidate:
        """The candidate with the most samples per second, regardless of the loss."""
        return min(self.candidates, key=lambda candidate: candidate.period)

    @property
    def soonest(self) -> Candidate:
        """The first candidate: the least time to synchronous training's loss."""
        return self.candidates[0]

    def document(self, candidate: Candidate | None = None) -> dict[str, Any]:
        """Return the contents of its file, for ``partition``; numbers that are not finite are None.

        Args:
            candidate: the one to cut and train by; None: the first.
        """
        chosen = self.candidates[0] if candidate is None else candidate
        microbatch = self._layers.at(self.batch / chosen.microbatches)
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
        mine = ("devices", "batch", "assumptions", "tried", "simulated", "left_out")
        content = {
            "spectrain_plan": PLAN_FORMAT,
            "model": str(self._layers.about.get("model", "")),
            "blocks": [asdict(block) for block in microbatch.blocks],
            **{name: getattr(chosen, name) for name in ("ends", "split_points", "settings")},
            **{name: getattr(self, name) for name in (*mine, "speeds", "memory")},
            "link": links[0] if len(links) == 1 else links,
            "candidates": candidates,
        }
        document: dict[str, Any] = finite(content)
        return document


def plan(
    layers: Layers,
    devices: int,
    *,
    link: str | float | Link | Sequence[str | float | Link],
    batch: int,
    memory: float | Sequence[float] | None = None,
    speed: float | Sequence[float] | None = None,
    replicas: int | None = None,
    cores: int | None = None,
    methods: Sequence[MethodName | str | Method] = METHODS,
    state: int = 1,
    codec: Codec | Codecs | None = None,
    host: float | None = None,
) -> TrainingPlan:
    """Choose how to train a model on some devices.

    This compares every number of stages, replicas and microbatches, both windows and all methods.
    Up to 32 divisions into stages are all compared; beyond, the one whose slowest stage is fastest.
    A bound on the period excludes ways that cannot be best; the rest is simulated.

    Devices may be unequal. They have the order of ranks, stage by stage, which is not changed. A
    stage's replicas take equal numbers of microbatches, so its slowest device counts, and the one
    with the least memory. A message takes the slowest link from the first device of its stage to
    the last device of the next, and a sum over replicas the slowest between them.

    Args:
        layers: from ``measure_layers`` or ``read_layers``.
        devices: their number; all are used.
        link: between any two devices: a name in ``LINKS``, bytes per second, or a ``Link``; or
            ``devices - 1`` of these, one between each two neighbours.
        batch: samples per minibatch, over all devices.
        memory: bytes per device, or one number for each; None: no limit.
        speed: of the devices relative to the measured one, or one number for each; None: 1.
        replicas: at most this many per stage; None: no limit. 1 plans for a single process.
        cores: that all devices share, as processes of one machine do; None: each has its own.
        methods: to compare; ``"sync"`` is data parallelism, in one stage.
        state: bytes of optimizer state per byte of parameters: 1 for SGD with momentum, 2 for Adam.
        codec: of the messages between stages, as for a pipeline.
        host: seconds that a CPU needs to issue an instruction, a forward or a backward of a stage,
            beside the calls of the modules. None: ``HOST_SECONDS`` if the layers were measured on a
            GPU, else 0, since a CPU's times contain it.

    Raises:
        ValueError: an argument is out of range, or no way fits.
        TypeError: ``codec`` is not a codec.

    Example:
        >>> from spectrain_ext.tools.planning import measure_layers, plan
        >>> layers = measure_layers([nn.Linear(8, 8), nn.Linear(8, 2)], torch.ones(4, 8))
        >>> found = plan(layers, 2, link="100gbe", batch=4, methods=["sync", "1f1b"])
        >>> sorted((c.method, c.replicas) for c in found.candidates)
        [('1f1b', (1, 1)), ('sync', (2,))]
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
    speeds = None if speed is None else one_each("speed", speed, devices, "device")
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
        if method.chunks > 1:
            raise ValueError(
                f"methods: {method.name!r} has {method.chunks} stages per device, a plan has one"
            )
    if host is None:
        host = HOST_SECONDS if _is_gpu(layers) else 0.0
    check_number("host", host)
    setting = Setting(layers, links, batch, cores, state, speeds, codecs, host)
    search = Search(setting, devices, made, limits, replicas)
    prices: tuple[Callable[[Costs], float], ...] = (lambda costs: 1.0, _price)
    best = (search.best(method, price) for method in made for price in prices)
    ways = {id(costs): costs for costs in best if costs is not None}
    if not ways:
        raise ValueError(_nothing(search, devices, batch)) from search.refusal
    candidates = sorted(map(_candidate, ways.values()), key=lambda candidate: candidate._rank)
    return TrainingPlan(
        devices,
        batch,
        links,
        tuple(candidates),
        search.tried,
        search.simulated,
        search.left_out,
        search.closest[0],
        _assumptions(layers, links, speeds, cores, codec, host),
        speeds,
        limits,
        layers,
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
        batch / costs.period if costs.period else math.inf,
        costs.memory,
        costs.delay,
        _quality(costs),
        costs.limited_by_calls,
        costs.seconds_of_calls,
    )


def _is_gpu(layers: Layers) -> bool:
    return "cpu" not in str(layers.about.get("device", "cpu")).lower()


def _assumptions(
    layers: Layers,
    links: tuple[Link, ...],
    speeds: tuple[float, ...] | None,
    cores: int | None,
    codec: object,
    host: float,
) -> tuple[str, ...]:
    where = ", ".join(f"{key} {value}" for key, value in layers.about.items())
    lines = [f"layer times are measured ({where or 'as the profile says'})"]
    if speeds is not None:
        times = ", ".join(f"{number:g}" for number in dict.fromkeys(speeds))
        lines.append(f"ASSUMED: devices compute {times} times as fast as that, every layer alike")
    for link in dict.fromkeys(links):
        source = "" if "measured" in link.name else ": published or given, not measured"
        lines.append(
            f"link {link.name}: {link.bandwidth / 1e9:.4g} GB/s "
            f"{'into a device' if link.inbound else 'a direction'}, "
            f"{1e6 * link.latency:.4g} us{source}"
        )
    if codec is not None:
        lines.append(
            f"ASSUMED: codec={codec!r} packs float32 messages, in no time, at no cost to the loss"
        )
    if host:
        source = "measured on one H200, 2026-11-26" if host == HOST_SECONDS else "given"
        lines.append(f"a CPU issues an instruction in {1e6 * host:.4g} us: {source}")
    if cores is not None:
        lines.append(f"all devices share {cores} cores")
    lines.append("periods and throughput are simulated; memory and delay are counted")
    lines.append(
        "ranked by ms x minibatches; minibatches to a loss are those of synchronous training (1) "
        "times what was measured on other workloads at that delay, of which the worst counts: "
        "docs/frontier.md"
    )
    return tuple(lines)


def _nothing(search: Search, devices: int, batch: int) -> str:
    if search.left_out:
        needed, available = search.closest
        return (
            f"memory: all {search.left_out} ways that were looked at take more than {available:g} "
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


def write_plan(path: str | os.PathLike[str], plan: TrainingPlan) -> None:
    """Write ``plan.document()`` to a JSON file, for ``partition(plan=...)``.

    Example:
        >>> from spectrain_ext.tools.planning import measure_layers, plan, write_plan
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> layers = measure_layers(model, torch.ones(4, 8))
        >>> write_plan("plan.json", plan(layers, 2, link="nvlink", batch=4, replicas=1))
        >>> len(st.partition(model, plan="plan.json"))
        2
    """
    text = json.dumps(plan.document(), indent=1, allow_nan=False)
    replace_file(Path(path), f"{text}\n".encode())
