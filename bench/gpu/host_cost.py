"""Measures the CPU cost per action of four stages on one GPU, with negligible GPU work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import bench_pipeline as bp

from .cases import Cases
from .scale import Scale

_WIDTH, _ROUNDS = 16, 5


def host_cost(cases: Cases, scale: Scale) -> None:
    """Run a case per method, after the modules alone."""
    batches = bp.make_batches(_WIDTH, scale.device)

    def median_us(call: Callable[[], object]) -> float:
        call()
        seconds = []
        for _ in range(min(_ROUNDS, scale.rounds)):
            scale.wait()
            start = time.perf_counter()
            call()
            scale.wait()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e6

    alone = bp.make_stages(_WIDTH, scale.device)
    base = cases.run(
        "modules", lambda: {"median_us": median_us(lambda: bp.modules_only(alone, batches))}
    )

    def of(method: str) -> dict[str, float | None]:
        stages = bp.make_stages(_WIDTH, scale.device)
        pipe = bp.make_pipeline(stages, method, devices=[scale.device] * bp.STAGES)
        median = median_us(lambda: bp.run(pipe, batches))
        pipe.release()
        microbatch = median / pipe.places[0].microbatches
        own = (microbatch - base["median_us"]) / bp.INSTRUCTIONS if base else None
        return {"median_us": median, "own_cost_us_per_action": own}

    # The most important comparisons first.
    chosen = sorted(bp.METHODS, key=lambda m: m not in ("spectrain", "pipedream", "vanilla"))
    for method in chosen[: scale.few]:
        cases.run(method, lambda m=method: of(m))  # type: ignore[misc]
