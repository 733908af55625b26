"""Measures the CPU cost per action of four stages on one GPU, with negligible GPU work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import bench_pipeline as bp

from .cases import Cases
from .scale import Scale

_WIDTH = 16


def host_cost(cases: Cases, scale: Scale) -> None:
    """Run a case per method, after the modules alone."""
    batches = bp.make_batches(_WIDTH, scale.device)

    def times(call: Callable[[], object]) -> list[float]:
        for _ in range(min(3, scale.rounds)):
            call()
        seconds = []
        for _ in range(scale.rounds):
            scale.wait()
            start = time.perf_counter()
            call()
            scale.wait()
            seconds.append(time.perf_counter() - start)
        return seconds

    def by_hand() -> dict[str, float]:
        stages = bp.make_stages(_WIDTH, scale.device)
        seconds = times(lambda: bp.modules_only(stages, batches))
        return {"median_us": statistics.median(seconds) * 1e6}

    base = cases.run("modules", by_hand)

    def of(method: str) -> dict[str, float]:
        stages = bp.make_stages(_WIDTH, scale.device)
        pipe = bp.make_pipeline(stages, method, devices=[scale.device] * bp.STAGES)
        median = statistics.median(times(lambda: bp.run(pipe, batches))) * 1e6
        pipe.release()
        result = {"median_us": median}
        if base is not None:
            actions = 2 * bp.STAGES * bp.MINIBATCHES
            result["own_cost_us_per_action"] = (median - base["median_us"]) / actions
        return result

    # The most important comparisons first.
    chosen = sorted(bp.METHODS, key=lambda m: m not in ("spectrain", "pipedream", "vanilla"))
    for method in chosen[: scale.few]:
        cases.run(method, lambda m=method: of(m))  # type: ignore[misc]
