"""Measures operations and their rivals on workloads: one case after the other, rivals in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from spectrain_ext.operators.plan import Plan

from .clock import Contestant, OnDevice, OnHost, take_turns
from .copies import LIMIT, copied_bytes, copies, references
from .device_rivals import device_rivals
from .machine import environment, free_bytes
from .operations import PREDICT, SGD_1, STEPS, Call, Operation, adam_numbers, applies, ours
from .report import Report, Row, spread
from .rivals import compiled, rivals
from .workloads import Streams, Workload, dtype_of

_COMPILED_TENSORS = 10  # beyond that torch.compile takes minutes


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        device: "cpu", or a CUDA device.
        case_s: seconds for the samples of one case (an operation on a workload).
        sample_s: how long one sample lasts at least.
        compile: also torch.compile, for up to ten tensors.
        memory_bytes: what tensors may take; None: most of what is free.
        until: `time.monotonic()` after which no case is begun.
    """

    device: str = "cpu"
    case_s: float = 1.0
    sample_s: float = 5e-4
    compile: bool = False
    memory_bytes: int | None = None
    until: float = float("inf")


def measure(
    operations: Sequence[Operation],
    workloads: Sequence[Workload],
    settings: Settings,
    tell: Callable[[str], None] = lambda line: None,
    *,
    overhead: bool = True,
) -> Report:
    """Measure every operation on every workload; `tell` hears what comes next.

    Without `overhead` what calls cost the host in general is left out (`host_overhead`).
    """
    kept = {k: v for k, v in asdict(settings).items() if k in ("case_s", "sample_s", "compile")}
    report = Report(environment(settings.device), kept)
    host: dict[tuple[Operation, int, str], dict[str, float]] = {}
    for work in workloads:
        for operation in operations:
            if not applies(operation, work):
                continue
            name = f"{operation.name}, {work.name}, {work.precision.name}"
            needed = bytes_needed(operation, work)
            limit = settings.memory_bytes or int(0.85 * free_bytes(settings.device))
            if needed > limit:
                report.left_out.append(
                    f"{name}: needs {needed / 2**30:.1f} GiB, {limit / 2**30:.1f} may be used"
                )
                continue
            if time.monotonic() > settings.until:
                report.left_out.append(f"{name}: no time left")
                continue
            tell(name)
            key = operation, work.count, work.precision.name
            if key not in host:
                host[key] = host_times(operation, work, settings.device)
            report.rows += _case(operation, work, settings, host[key])
    if operations and overhead:
        report.host_us = host_overhead(settings.device)
    return report


def bytes_needed(operation: Operation, work: Workload) -> int:
    """Memory for the streams, for what rivals keep, and for the yardstick."""
    streams = sum(dtype_of(work, letter).itemsize for letter in operation.letters)
    scratch = 4 * ("u" in operation.letters) + 4 * (work.precision.name == "mixed") + 4
    return work.elements * (streams + scratch) + min(LIMIT, operation.bytes_moved(work))


def _case(
    operation: Operation, work: Workload, settings: Settings, host_us: dict[str, float]
) -> list[Row]:
    device, nbytes = settings.device, operation.bytes_moved(work)
    count = 1 if device == "cpu" else _sets(operation, work, device)
    sets = [Streams(work, device) for _ in range(count)]
    makers: list[tuple[str, Callable[[Streams], dict[str, Call]]]] = [
        ("ours", lambda s: ours(operation, s)),
        ("rival", lambda s: {**rivals(operation, s), **device_rivals(operation, s)}),
        ("reference", lambda s: references(operation, s)),
        ("copy", lambda s: copies(nbytes, device)),
    ]
    kinds: dict[str, str] = {}
    calls: dict[str, list[Call]] = {}
    for kind, make in makers:
        for s in sets:
            for name, call in make(s).items():
                kinds[name] = kind
                calls.setdefault(name, []).append(call)
    compile_s: dict[str, float] = {}
    compiles = work.count <= _COMPILED_TENSORS and work.precision.name != "bf16"
    if settings.compile and compiles:
        name = "torch.compile"
        kinds[name] = "rival"
        calls[name], compile_s[name] = compiled(operation, sets)
    contestants: dict[str, Contestant] = {
        name: OnHost(each[0], settings.sample_s)
        if device == "cpu"
        else OnDevice(each, settings.sample_s)
        for name, each in calls.items()
    }
    times = take_turns(contestants, settings.case_s)
    copied = copied_bytes(nbytes)
    moved = {"copy": copied, "reference": work.elements * 8}
    figures = {name: spread(seconds) for name, seconds in times.items()}
    yardsticks = [figures[name] for name, kind in kinds.items() if kind == "copy"]
    ceiling = max(copied / median for median, _, _ in yardsticks)
    ceiling_best = max(copied / best for _, _, best in yardsticks)
    rows = []
    for name, (median, iqr, best) in figures.items():
        size = moved.get(kinds[name], nbytes)
        row = Row(
            *(operation.name, work.name, work.precision.name, name, kinds[name], size),
            *(median * 1e6, iqr * 1e6, best * 1e6, len(times[name])),
            gb_per_s=size / median / 1e9,
            share=size / median / ceiling,
            share_best=size / best / ceiling_best,
            host_us=host_us.get(name),
            compile_s=compile_s.get(name),
            how=contestants[name].how,
            elements=work.elements,
            tensors=work.count,
        )
        rows.append(row)
    return rows


def _sets(operation: Operation, work: Workload, device: str) -> int:
    """How many sets of tensors to rotate, so that none is in the L2 cache when its turn comes."""
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 2**26
    fitting = int(0.6 * free_bytes(device)) // max(1, bytes_needed(operation, work))
    count = sets_needed(operation.bytes_moved(work), l2)
    # Hundreds of tensors mean thousands of launches a set: the launches decide there, not caches.
    return max(1, min(count, fitting, 64 if work.count <= 10 else 4))


def sets_needed(nbytes: int, l2_bytes: int) -> int:
    """Sets that put four times the L2 cache between two uses of one."""
    return max(2, -(-4 * l2_bytes // max(1, nbytes)) + 1)


def host_times(operation: Operation, work: Workload, device: str) -> dict[str, float]:
    """Microseconds of a call on as many empty tensors, by implementation."""
    s = Streams(work.emptied(), device)
    return _microseconds({**ours(operation, s), **rivals(operation, s)}, 2e-4, 0.02)


def host_overhead(device: str = "cpu") -> dict[str, float]:
    """Microseconds of the calls of a plan of empty tensors, and of refreshing its gradients."""
    count = 300
    s = Streams(Workload("empty", ((0,),) * count), device)
    params = [torch.zeros(4, device=device, requires_grad=True) for _ in range(count)]
    for p in params:
        p.grad = torch.zeros_like(p)
    trained = Plan(params, momentum_buffers=[torch.zeros_like(p) for p in params])
    adam = Plan(s["w"], exp_avgs=s["v"], exp_avg_sqs=s["u"], grads=s["g"], outs=[s["o"]])
    numbers = [adam_numbers()]
    empty = f"{count} empty tensors"
    calls: dict[str, Call] = {
        f"Plan.predict, {empty}": ours(PREDICT, s)["Plan"],
        f"Plan.sgd_step_ + 1 prediction, {empty}": ours(SGD_1, s)["Plan"],
        f"Plan.adam_step_ + 1 prediction, {empty}": lambda: adam.adam_step_(
            numbers, predict=STEPS[:1]
        ),
        f"Plan.refresh, {count} gradients": trained.refresh,
    }
    return _microseconds(calls, 5e-4, 0.3)


def _microseconds(calls: dict[str, Call], sample_s: float, budget_s: float) -> dict[str, float]:
    times = take_turns({name: OnHost(call, sample_s) for name, call in calls.items()}, budget_s)
    return {name: spread(seconds)[0] * 1e6 for name, seconds in times.items()}
