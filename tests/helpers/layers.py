"""Layers of a planner with made-up times and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectrain_ext.partitioning import BlockProfile, Profile
from spectrain_ext.tools.planning import Layers, Link

SLOW = Link("slow", 1e6, 1e-4)


def layers_of(
    seconds: Sequence[float],
    outputs: int = 1000,
    parameters: int = 4000,
    saved: int = 3000,
    samples: tuple[int, int] = (4, 8),
    **more: Any,
) -> Layers:
    """Return blocks with these seconds and bytes for the larger number of samples."""

    def profile(share: float) -> Profile:
        sizes = int(outputs * share), parameters, int(saved * share)
        blocks = (BlockProfile(s * share, *sizes, str(i)) for i, s in enumerate(seconds))
        return Profile(tuple(blocks))

    return Layers(samples, (profile(samples[0] / samples[1]), profile(1.0)), **more)


SOME = layers_of([0.010, 0.014, 0.007, 0.021, 0.009])
