"""What it takes to generate, check, count and simulate large schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from spectrain_ext.schedule import (
    Durations,
    interleave,
    simulate,
    streams,
    summarize,
    validate,
)

STAGES, MINIBATCHES = 64, 10_000


def classic(stages: int) -> list[int]:
    return [stages - k for k in range(stages)]


def measure(
    benchmark: Any, name: str, stages: int, minibatches: int, call: Callable[[], Any]
) -> Any:
    benchmark.group = f"{stages} stages, {minibatches} minibatches, one microbatch each"
    benchmark.extra_info.update(group=benchmark.group, name=name)
    return benchmark.pedantic(call, rounds=3, iterations=1)


def test_generate_and_run_against_each_other(benchmark: Any) -> None:
    def call() -> None:
        deque(interleave(streams("1f1b-async", classic(STAGES)), MINIBATCHES), maxlen=0)

    measure(benchmark, "generate, interleave", STAGES, MINIBATCHES, call)


def test_generate_validate_and_count(benchmark: Any) -> None:
    windows = classic(STAGES)

    def call() -> Any:
        endless = streams("1f1b-async", windows)
        return validate(endless, minibatches=MINIBATCHES, microbatches=1, windows=windows)

    found = measure(benchmark, "generate, validate and count", STAGES, MINIBATCHES, call)
    assert found[0].delays[STAGES - 1] == MINIBATCHES - (STAGES - 1)


def test_simulate(benchmark: Any) -> None:
    def call() -> Any:
        endless = streams("1f1b-async", classic(STAGES))
        durations = Durations.of(STAGES, forward=1, backward=2, activation=0.5, gradient=0.5)
        return summarize(simulate(endless, durations, minibatches=1000))

    measure(benchmark, "simulate", STAGES, 1000, call)
