"""How long calls take: contestants in turn, so that whatever else the machine does hits all."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .operations import Call


class OnHost:
    """A call timed by the wall clock, often enough for a sample to last a while."""

    how = "clock"

    def __init__(self, call: Call, sample_s: float) -> None:
        self._call = call
        call()
        self._repeat = 1
        self._repeat = _times(sample_s, self.sample(), 100_000)

    def sample(self) -> float:
        call = self._call
        start = time.perf_counter()
        for _ in range(self._repeat):
            call()
        return (time.perf_counter() - start) / self._repeat


class OnDevice:
    """Calls on rotating sets of tensors between two CUDA events, replayed from a graph if can be.

    A graph leaves out what the host costs; what cannot be captured is launched by the host.
    """

    def __init__(self, calls: Sequence[Call], sample_s: float) -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()
        self._calls = calls
        self._graph = _capture(calls)
        self.how = "events" if self._graph is None else "graph"
        self._repeat = 1
        self._repeat = _times(sample_s, self.sample() * len(calls), 1000)

    def sample(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self._repeat):
            if self._graph is not None:
                self._graph.replay()
            else:
                for call in self._calls:
                    call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / self._repeat / len(self._calls)


def _times(sample_s: float, once_s: float, most: int) -> int:
    """How often something is done in one sample."""
    return max(1, min(most, int(sample_s / max(once_s, 1e-7))))


def _capture(calls: Sequence[Call]) -> Any:
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except (RuntimeError, ValueError):
        torch.cuda.synchronize()
        return None
    return graph


Contestant = OnHost | OnDevice


def take_turns(
    contestants: Mapping[str, Contestant], budget_s: float, at_least: int = 5, at_most: int = 200
) -> dict[str, list[float]]:
    """Sample all in turn, each round starting with another one, until the budget is used up.

    Returns seconds of one call, one figure per sample.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
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
                times[name].append(contestants[name].sample())
    finally:
        if collecting:
            gc.enable()
    return times
