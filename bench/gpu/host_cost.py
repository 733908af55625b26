"""Measures the CPU cost per action of four stages on one GPU, with negligible GPU work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import bench_pipeline as bp

from .cases import Cases
from .scale import Scale

_WIDTH = 16
_ROUNDS = 5


def host_cost(cases: Cases, scale: Scale) -> None:
    """Run a case per method, after the modules alone."""
    batches = bp.make_batches(_WIDTH, scale.device)

    def times(call: Callable[[], object]) -> list[float]:
        call()
        seconds = []
        for _ in range(min(_ROUNDS, scale.rounds)):
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
        result = {"median_us": median}
        if base is not None:
            result["own_cost_us_per_action"] = bp.own_cost(pipe, median, base["median_us"])
        pipe.release()
        return result

    # The most important comparisons first.
    chosen = sorted(bp.METHODS, key=lambda m: m not in ("spectrain", "pipedream", "vanilla"))
    for method in chosen[: scale.few]:
        cases.run(method, lambda m=method: of(m))  # type: ignore[misc]
