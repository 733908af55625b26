"""Measures the time to generate, check, count and simulate large schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from spectrain_ext.schedule.order import interleave
from spectrain_ext.simulation import (
    Durations,
    simulate,
    simulate_repeating,
    streams,
    summarize,
    validate,
)

STAGES, MINIBATCHES = 64, 10_000
MANY_STAGES, FEWER_MINIBATCHES = 1024, 2048


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


def test_simulate_by_events(benchmark: Any) -> None:
    def call() -> Any:
        endless = streams("1f1b-async", classic(STAGES))
        durations = Durations.of(STAGES, forward=1, backward=2, activation=0.5, gradient=0.5)
        return summarize(simulate(endless, durations, minibatches=1000))

    measure(benchmark, "simulate, by events", STAGES, 1000, call)


def test_simulate_by_levels(benchmark: Any) -> None:
    def call() -> Any:
        durations = Durations.of(MANY_STAGES, forward=1, backward=2, activation=0.5, gradient=0.5)
        return simulate_repeating(
            "1f1b-async", classic(MANY_STAGES), 1, FEWER_MINIBATCHES, durations
        )

    measure(benchmark, "simulate 1F1B without a flush", MANY_STAGES, FEWER_MINIBATCHES, call)


def test_simulate_a_flush_by_levels(benchmark: Any) -> None:
    def call() -> Any:
        durations = Durations.of(MANY_STAGES, forward=1, backward=2, activation=0.5, gradient=0.5)
        return simulate_repeating("gpipe", [1] * MANY_STAGES, 1, FEWER_MINIBATCHES, durations)

    measure(benchmark, "simulate GPipe", MANY_STAGES, FEWER_MINIBATCHES, call)
