"""Tests pipelines over several GPUs in one process against the CPU's bits."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .cases import Cases
from .exact import Exact, same
from .scale import Scale
from .stress import Delays

_METHODS = ("auto", "spectrain", "1f1b", "pipedream")


def devices(cases: Cases, scale: Scale) -> None:
    """Run pipelines over two and more devices, some with one device late."""
    delays = Delays(scale)
    cases.run("peer access", lambda: _access(scale))
    for late in (None, 0, 1):
        for count in sorted(c for c in scale.processes if c <= scale.gpus):
            for method in _METHODS[: scale.few]:
                who = "" if late is None else f", device {late} is late"
                cases.run(
                    f"{method} over {count} devices{who}",
                    lambda m=method, n=count, k=late: _pipeline(m, n, k, delays, scale),  # type: ignore[misc]
                )


def _access(scale: Scale) -> dict[str, Any]:
    """Return which devices reach each other's memory without going through the CPU."""
    every = range(scale.gpus)
    if not scale.on_gpu:
        return {"reaches": [[True] * len(every)] * len(every)}
    can = torch.cuda.can_device_access_peer
    return {"reaches": [[a == b or can(a, b) for b in every] for a in every]}


def _pipeline(
    method: str, count: int, late: int | None, delays: Delays, scale: Scale
) -> dict[str, Any]:
    """Place stages on devices in turn, so that every message crosses; two devices have two each."""
    stages, several = max(4, count), method in ("auto", "1f1b")
    minibatches = 24 if scale.on_gpu else 6
    exact = Exact(method, stages, microbatches=stages if several else 1, minibatches=minibatches)
    places = list(itertools.islice(itertools.cycle(scale.devices(count)), exact.stages))
    expected = exact.on_cpu()
    with delays.seeded(count, places[late] if late is not None else None):
        same(exact.train(places), expected)
    return {"bits": "the CPU's", "works": delays.delayed}
