"""Operators against torch's own, and both against the best plain copy of as many bytes."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from cases import (
    LR,
    MOMENTUM,
    SIXTEEN_BIT,
    STEPS,
    TRAFFIC,
    WORKLOADS,
    Workload,
    build,
    bytes_moved,
    copies,
    implementations,
)

import spectrain_ext as st

NAMES = {
    "predict": ["operator", "Plan", "torch.add(out=)", "_foreach"],
    "predict_": ["operator", "Plan", "Tensor.add_", "_foreach"],
    "stash": ["operator", "Plan", "Tensor.copy_", "_foreach"],
    "swap_": ["operator", "Plan", "three copies"],
    "stash_predict_": ["operator", "Plan", "_foreach"],
    "sgd_step_": [
        "operator",
        "Plan",
        "optim.SGD fused",
        "optim.SGD foreach",
        "optim.SGD for loop",
    ],
    "sgd_step_ + 2 predictions": [
        "operator",
        "Plan",
        "optim.SGD fused + _foreach",
        "optim.SGD foreach + _foreach",
    ],
}


@cache
def _best_copy(nbytes: int) -> tuple[str, float]:
    """The fastest of several plain copies that move as many bytes (read and written), in GB/s."""
    import time

    elements = max(1, nbytes // 8)
    best: dict[str, float] = {}
    calls = copies(elements)
    repeat = max(1, min(1000, int(2e8 / nbytes)))
    for _, (name, call) in itertools.product(range(7), calls.items()):
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        seconds = (time.perf_counter() - start) / repeat
        best[name] = min(best.get(name, seconds), seconds)
    name = min(best, key=best.__getitem__)
    return name, 8 * elements / best[name] / 1e9


def _note(benchmark: Any, group: str, name: str, nbytes: int | None = None) -> None:
    benchmark.group = group
    benchmark.extra_info.update(
        group=group, name=name, torch=torch.__version__, threads=torch.get_num_threads()
    )
    if nbytes and benchmark.stats is not None:
        copy, ceiling = _best_copy(nbytes)
        rate = nbytes / benchmark.stats.stats.median / 1e9
        benchmark.extra_info.update(
            bytes=nbytes,
            gb_per_s=rate,
            best_copy=copy,
            best_copy_gb_per_s=ceiling,
            share_of_copy=rate / ceiling,
        )


_ROWS = [(op, name, work) for work in WORKLOADS for op in TRAFFIC for name in NAMES[op]]


@pytest.mark.parametrize(
    ("operator", "name", "work"), _ROWS, ids=[f"{w.name}-{op}-{n}" for op, n, w in _ROWS]
)
def test_operator(benchmark: Any, operator: str, name: str, work: Workload) -> None:
    streams = build(work)
    call = implementations(operator, streams)[name]
    call()
    benchmark(call)
    _note(benchmark, f"{operator}, {work.name}", name, bytes_moved(operator, work))
    benchmark.extra_info["working_set_bytes"] = streams.nbytes


@pytest.mark.parametrize("operator", ["predict", "sgd_step_", "sgd_step_ + 2 predictions"])
@pytest.mark.parametrize("name", ["operator", "Plan"])
def test_sixteen_bit_weights(benchmark: Any, operator: str, name: str) -> None:
    """bfloat16 weights beside a float32 momentum: torch has no fused rival of that."""
    streams = build(SIXTEEN_BIT)
    call = implementations(operator, streams)[name]
    call()
    benchmark(call)
    _note(benchmark, f"{operator}, {SIXTEEN_BIT.name}", name, bytes_moved(operator, SIXTEEN_BIT))


@pytest.mark.parametrize("operator", ["predict", "sgd_step_ + 2 predictions"])
def test_views_of_one_flat_buffer(benchmark: Any, operator: str) -> None:
    """What a pipeline does: 300 views that merge into one row."""
    work = WORKLOADS[2]
    call = implementations(operator, build(work, flat=True))["Plan"]
    call()
    benchmark(call)
    _note(benchmark, f"{operator}, {work.name}, flat", "Plan", bytes_moved(operator, work))


class TestHostOverhead:
    """What a call costs when there is nothing to do: empty tensors."""

    @pytest.mark.parametrize("count", [1, 300])
    @pytest.mark.parametrize(
        "method", ["predict_", "predict", "stash", "swap_", "sgd_step_", "refresh"]
    )
    def test_plan(self, benchmark: Any, method: str, count: int) -> None:
        lists = [[torch.empty(0) for _ in range(count)] for _ in range(5)]
        w, v, g, kept, out = lists
        plan = st.Plan(w, momentum_buffers=v, grads=g, stashed=kept, outs=[out])
        scaled = {"lr": LR, "steps": STEPS}
        arguments: dict[str, dict[str, Any]] = {
            "predict_": scaled,
            "predict": scaled,
            "sgd_step_": {"lr": LR, "momentum": MOMENTUM, "predict": [STEPS]},
        }
        call = getattr(plan, method)
        keywords = arguments.get(method, {})
        benchmark(lambda: call(**keywords))
        _note(benchmark, f"host overhead, {count} empty tensors", f"Plan.{method}")

    @pytest.mark.parametrize("count", [1, 300])
    def test_operator(self, benchmark: Any, count: int) -> None:
        w, v = ([torch.empty(0) for _ in range(count)] for _ in range(2))
        benchmark(lambda: st.predict_(w, v, lr=LR, steps=STEPS))
        _note(benchmark, f"host overhead, {count} empty tensors", "predict_")

    @pytest.mark.parametrize("count", [1, 300])
    def test_torch(self, benchmark: Any, count: int) -> None:
        w, v = ([torch.empty(0) for _ in range(count)] for _ in range(2))
        benchmark(lambda: torch._foreach_add_(w, v, alpha=-0.1))
        _note(benchmark, f"host overhead, {count} empty tensors", "torch._foreach_add_")

    def test_making_a_plan(self, benchmark: Any) -> None:
        w, v = ([torch.empty(0) for _ in range(300)] for _ in range(2))
        benchmark(lambda: st.Plan(w, momentum_buffers=v))
        _note(benchmark, "host overhead, 300 empty tensors", "Plan()")
