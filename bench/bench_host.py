"""Measures the CPU cost of a call: every operator on empty tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rivals.in_torch import rivals
from rivals.operations import OPERATIONS, host_calls, ours
from rivals.workloads import Streams, Workload

import spectrain_ext as st


def _empty(count: int) -> Streams:
    return Streams(Workload("empty", ((0,),) * count))


def _note(benchmark: Any, group: str, name: str) -> None:
    benchmark.group = group
    benchmark.extra_info.update(group=group, name=name, torch=torch.__version__)


_NAMES = [
    (operation, name)
    for operation in OPERATIONS
    for calls in [{**ours(operation, _empty(1)), **rivals(operation, _empty(1))}]
    for name in calls
]


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize(
    ("operation", "name"), _NAMES, ids=[f"{op.name}-{name}" for op, name in _NAMES]
)
def test_operation(benchmark: Any, operation: Any, name: str, count: int) -> None:
    s = _empty(count)
    benchmark({**ours(operation, s), **rivals(operation, s)}[name])
    _note(benchmark, f"{operation.name}, {count} empty tensors", name)


@pytest.mark.parametrize("call", list(host_calls(count=1)))
def test_plan(benchmark: Any, call: str, request: pytest.FixtureRequest) -> None:
    """The figures of docs/benchmarks.md; gradients stay at the addresses of the last backward."""
    benchmark(host_calls(request.config.option.device)[call])
    what = "gradients" if call == "refresh" else "empty tensors"
    _note(benchmark, f"a plan's calls, 300 {what}", f"Plan: {call}, 300 {what}")
    benchmark.extra_info["host"] = True


def test_making_a_plan(benchmark: Any) -> None:
    s = _empty(300)
    w, v = s["w"], s["v"]
    benchmark(lambda: st.Plan(w, momentum_buffers=v))
    _note(benchmark, "making a plan, 300 empty tensors", "Plan")
