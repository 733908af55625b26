"""Measures operations and their rivals on workloads: one case after the other, rivals in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from spectrain_ext.operators.plan import Plan

from .clock import Contestant, OnDevice, OnHost, Times, take_turns
from .copies import LIMIT, copies
from .device_rivals import device_rivals
from .machine import environment, free_bytes
from .operations import LR, MOMENTUM, STEPS, Call, Operation, adam_numbers, applies, ours
from .report import Report, Row, spread
from .rivals import compiled, references, rivals
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
    sets = [Streams(work, device)]
    if device != "cpu":
        sets += [Streams(work, device) for _ in range(_sets(operation, work, device) - 1)]
    tables: list[dict[str, Call]] = []
    kinds: dict[str, str] = {}
    for s in sets:
        groups = {
            "ours": ours(operation, s),
            "rival": {**rivals(operation, s), **device_rivals(operation, s)},
            "reference": references(operation, s),
        }
        kinds.update({name: kind for kind, calls in groups.items() for name in calls})
        tables.append({name: call for calls in groups.values() for name, call in calls.items()})
    compile_s: float | None = None
    compiles = work.count <= _COMPILED_TENSORS and work.precision.name != "bf16"
    if settings.compile and compiles:
        programs, compile_s = compiled(operation, sets)
        kinds["torch.compile"] = "rival"
        for table, program in zip(tables, programs, strict=True):
            table["torch.compile"] = program
    copied, yardsticks = zip(*(copies(nbytes, device) for _ in sets), strict=True)
    for table, more in zip(tables, yardsticks, strict=True):
        table.update(more)
    kinds.update(dict.fromkeys(yardsticks[0], "copy"))
    contestants: dict[str, Contestant] = {
        name: _contestant([table[name] for table in tables], settings) for name in tables[0]
    }
    times = take_turns(contestants, settings.case_s)
    rows = _rows(operation, work, kinds, times, copied[0], host_us)
    if compile_s is None:
        return rows
    return [
        Row(**{**asdict(r), "compile_s": compile_s}) if r.implementation == "torch.compile" else r
        for r in rows
    ]


def _rows(
    operation: Operation,
    work: Workload,
    kinds: dict[str, str],
    times: dict[str, Times],
    copied: int,
    host_us: dict[str, float],
) -> list[Row]:
    nbytes = operation.bytes_moved(work)
    figures = {name: spread(t.seconds) for name, t in times.items()}
    copies_ = [name for name, kind in kinds.items() if kind == "copy"]
    ceiling = max(copied / figures[name][0] for name in copies_)
    ceiling_best = max(copied / figures[name][2] for name in copies_)
    rows = []
    for name, (median, iqr, best) in figures.items():
        kind = kinds[name]
        moved = copied if kind == "copy" else nbytes
        if kind == "reference":
            moved = work.elements * 8
        rows.append(
            Row(
                operation.name,
                work.name,
                work.precision.name,
                name,
                kind,
                moved,
                median * 1e6,
                iqr * 1e6,
                best * 1e6,
                len(times[name].seconds),
                moved / median / 1e9,
                moved / median / ceiling,
                moved / best / ceiling_best,
                host_us.get(name),
                None,
                times[name].how,
                work.elements,
                work.count,
            )
        )
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


def _contestant(calls: Sequence[Call], settings: Settings) -> Contestant:
    if settings.device == "cpu":
        return OnHost(calls[0], settings.sample_s)
    return OnDevice(calls, settings.sample_s)


def host_times(operation: Operation, work: Workload, device: str) -> dict[str, float]:
    """Microseconds of a call on as many empty tensors, by implementation."""
    s = Streams(work.emptied(), device)
    calls = {**ours(operation, s), **rivals(operation, s)}
    times = take_turns({name: OnHost(call, 2e-4) for name, call in calls.items()}, 0.02)
    return {name: spread(t.seconds)[0] * 1e6 for name, t in times.items()}


def host_overhead(device: str = "cpu", count: int = 300) -> dict[str, float]:
    """Microseconds of the calls of a plan of empty tensors, and of refreshing its gradients."""
    lists = [[torch.empty(0, device=device) for _ in range(count)] for _ in range(5)]
    w, v, u, g, out = lists
    plan = Plan(w, momentum_buffers=v, grads=g, outs=[out])
    adam = Plan(w, exp_avgs=v, exp_avg_sqs=u, grads=g, outs=[out])
    params = [torch.zeros(4, device=device, requires_grad=True) for _ in range(count)]
    for p in params:
        p.grad = torch.zeros_like(p)
    trained = Plan(params, momentum_buffers=[torch.zeros_like(p) for p in params])
    numbers = [adam_numbers()]
    calls: dict[str, Call] = {
        "Plan.predict": lambda: plan.predict(lr=LR, steps=STEPS[0]),
        "Plan.sgd_step_ + 1 prediction": lambda: plan.sgd_step_(
            lr=LR, momentum=MOMENTUM, predict=STEPS[:1]
        ),
        "Plan.adam_step_ + 1 prediction": lambda: adam.adam_step_(numbers, predict=STEPS[:1]),
        "Plan.refresh": trained.refresh,
    }
    times = take_turns({name: OnHost(call, 5e-4) for name, call in calls.items()}, 0.3)
    return {
        f"{name}, {count} {'gradients' if name == 'Plan.refresh' else 'empty tensors'}": spread(
            t.seconds
        )[0]
        * 1e6
        for name, t in times.items()
    }
