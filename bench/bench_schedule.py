"""Measures the time to generate, check, count and simulate large schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from spectrain_ext.tools.simulation import (
    Durations,
    device_order,
    simulate,
    streams,
    summarize,
    validate,
)

CLASSIC = range(64, 0, -1)  # windows by stage
NAME = "1f1b-async"


def durations(windows: Sequence[int]) -> Durations:
    return Durations.of(len(windows), forward=1, backward=2, activation=0.5, gradient=0.5)


#: By name: windows, minibatches, and what to do with both.
CALLS: dict[str, tuple[Sequence[int], int, Callable[[Any, int], object]]] = {
    "generate, order": (
        *(CLASSIC, 1000),
        lambda w, n: deque(device_order(streams(NAME, w), range(len(w)), n), maxlen=0),
    ),
    "generate, validate and count": (
        *(CLASSIC, 1000),
        lambda w, n: validate(streams(NAME, w), minibatches=n, microbatches=1, windows=w),
    ),
    "simulate": (
        *(CLASSIC, 1000),
        lambda w, n: summarize(simulate(streams(NAME, w), durations(w), minibatches=n)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_schedule(benchmark: Any, name: str) -> None:
    windows, minibatches, call = CALLS[name]
    benchmark.group = f"{len(windows)} stages, {minibatches} minibatches, one microbatch each"
    benchmark.extra_info.update(group=benchmark.group, name=name)
    benchmark.pedantic(call, (windows, minibatches), rounds=3, iterations=1)
