"""Samples several measurements in turn, so that a disturbance affects all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping


def take_turns(
    samples: Mapping[str, Callable[[], float]],
    budget_s: float,
    at_least: int = 5,
    at_most: int = 200,
) -> dict[str, list[float]]:
    """Take a sample of each in every round, in rotating order, until the budget is used up."""
    found: dict[str, list[float]] = {name: [] for name in samples}
    names = list(samples)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for turn in range(at_most):
            if turn >= at_least and time.perf_counter() - start > budget_s:
                break
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(samples[name]())
    finally:
        if collecting:
            gc.enable()
    return found
