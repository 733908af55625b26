"""Schedules of a limited number of minibatches, and windows to draw them with."""

from __future__ import annotations

from hypothesis import strategies as some

from spectrain_ext.schedule import GENERATORS, Kind
from spectrain_ext.simulation import streams


def finite(name, windows, minibatches, microbatches=1):
    """Return every stage's actions, as lists."""
    found = []
    for actions in streams(name, windows, microbatches):
        found.append([])
        for action in actions:
            if action.minibatch < minibatches:
                found[-1].append(action)
            if action == (Kind.UPDATE, minibatches - 1, 0):
                break
    return found


@some.composite
def named_windows(draw, stages):
    """Draw the name of a generator, and non-increasing windows of 1 to ``stages`` stages."""
    name = draw(some.sampled_from(sorted(GENERATORS)))
    windows, least = [], 1
    for _ in range(draw(some.integers(1, stages))):
        least = draw(some.integers(least, least + 3))
        windows.insert(0, least)
    return name, windows
