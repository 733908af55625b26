"""Measures every operator and its rivals on rotating buffers, the largest first.

torch.compile comes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rivals import operations
from rivals.contest import OnHost, Settings, Times, contest
from rivals.machine import environment
from rivals.operations import ADAMW_2, LION_2, SGD_2, STAGE, Operation, host_calls
from rivals.workloads import BF16, FP32_16, MIXED, MIXED_16, Workload, model, synthetic
from turns import take_turns

from .cases import Cases
from .scale import Scale

_MAIN = [SGD_2, ADAMW_2, STAGE]
#: Seconds reserved for torch.compile.
_COMPILING_S = 25.0


def run_operators(cases: Cases, scale: Scale) -> None:
    """Run a case per operation, workload and types."""
    cases.run("environment", lambda: environment(scale.device))
    for operation, work in _cases(scale):
        name = f"{operation.name}, {work.name}, {work.precision.name}"
        reserve = _COMPILING_S if scale.compiles else 0.0
        cases.run(name, lambda o=operation, w=work: _rows(o, w, scale, False), reserve)  # type: ignore[misc]
    cases.run("host", lambda: _host(scale))
    for operation in _MAIN:
        work = synthetic((1,), scale.large[:1])[0]
        name = f"{operation.name}, {work.name}, torch.compile"
        cases.run(name, lambda o=operation, w=work: _rows(o, w, scale, True))  # type: ignore[misc]


def _cases(scale: Scale) -> Iterator[tuple[Operation, Workload]]:
    every = operations.OPERATIONS[-(scale.few or 0) :]
    rest = [o for o in every if o not in _MAIN]
    largest = scale.large[::-1]
    plain, mixed = synthetic((1,), largest), synthetic((1,), largest, MIXED)
    steps: list[tuple[list[Operation], list[Workload]]] = [
        (_MAIN, plain[:1]),
        (_MAIN, mixed[:1]),
        (rest, plain[:1]),
        (every, plain[1:]),
        (rest, mixed[:1]),
        (every, mixed[1:]),
        (_MAIN, [w for count, e in scale.many for w in synthetic((count,), (e,))]),
        (_MAIN, [model(name) for name in scale.models]),
        (_MAIN, synthetic((1,), largest[:1], BF16)),
        ([ADAMW_2, SGD_2, LION_2], synthetic((1,), largest[:1], FP32_16)),
        ([ADAMW_2, SGD_2, LION_2], synthetic((1,), largest[:1], MIXED_16)),
    ]
    for chosen, workloads in steps:
        for work in workloads:
            for operation in chosen:
                if operations.applies(operation, work) and operation in every:
                    yield operation, work


def _rows(
    operation: Operation, work: Workload, scale: Scale, compiles: bool
) -> list[dict[str, Any]]:
    """Return entries in the format of pytest-benchmark's JSON."""
    settings = Settings(scale.device, scale.case_s, scale.sample_s, compiles and scale.compiles)
    found = contest(operation, work, settings)
    chosen = found.items() if not compiles else [("torch.compile", found.get("torch.compile"))]
    return [times.as_benchmark() for _, times in chosen if times is not None]


def _host(scale: Scale) -> list[dict[str, Any]]:
    calls = {name: OnHost(call, 5e-4).sample for name, call in host_calls(scale.device).items()}
    return [
        Times(seconds, {"name": f"Plan: {name}, 300 tensors", "host": True}).as_benchmark()
        for name, seconds in take_turns(calls, scale.case_s).items()
    ]


def document_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the part's results so far in the format of pytest-benchmark's JSON."""
    about = dict(found.get("environment", {}).get("result") or {"device": "cuda"})
    document: dict[str, Any] = {"machine_info": about, "benchmarks": [], "left_out": []}
    for name, case in found.items():
        if case["status"] != "ok":
            document["left_out"].append(f"{name}: {case.get('error', case['status'])}")
        elif name != "environment":
            document["benchmarks"] += case["result"]
    return document
