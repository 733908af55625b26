"""Four stages on one GPU: the host's own cost per action, with no GPU work worth mentioning."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import bench_pipeline as bp
from table import summarize

from .cases import Cases
from .scale import Scale

_WIDTH = 16


def host_cost(cases: Cases, scale: Scale) -> None:
    """A case per method, after the modules driven by hand."""
    batches = bp.make_batches(_WIDTH, scale.device)
    group = f"{bp.STAGES} stages on one device, width {_WIDTH}, {bp.MINIBATCHES} minibatches"

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

    def by_hand() -> dict[str, Any]:
        stages = bp.make_stages(_WIDTH, scale.device)
        seconds = times(lambda: bp.modules_only(stages, batches))
        return {"row": asdict(summarize(group, "modules", seconds))}

    base = cases.run("modules", by_hand)

    def of(method: str) -> dict[str, Any]:
        stages = bp.make_stages(_WIDTH, scale.device)
        pipe = bp.make_pipeline(stages, method, devices=[scale.device] * bp.STAGES)
        seconds = times(lambda: bp.run(pipe, batches))
        pipe.release()
        result: dict[str, Any] = {"row": asdict(summarize(group, f"pipeline, {method}", seconds))}
        if base is not None:
            cost = statistics.median(seconds) * 1e6 - base["row"]["median_us"]
            result["own_cost_us_per_action"] = cost / (2 * bp.STAGES * bp.MINIBATCHES)
        return result

    # Beginning with the ones that are compared most.
    chosen = sorted(bp.METHODS, key=lambda m: m not in ("spectrain", "pipedream", "vanilla"))
    for method in chosen[: scale.few]:
        cases.run(method, lambda m=method: of(m))  # type: ignore[misc]
