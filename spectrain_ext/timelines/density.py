"""Adds up the time of blocks that are too narrow to draw, in bins of time."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

_FEWEST = 8  # bins of a picture


def bin_edges(first: float, last: float, least: float, step: float) -> list[float]:
    """Return the edges of equal bins from ``first`` to ``last``; the last bin may be shorter.

    A bin is the smallest multiple of ``step`` that is not below ``least``: with the time of a
    microbatch as step, all bins of a steady state look alike. Where that leaves fewer than 8 bins,
    or the step is 0, a bin is ``least`` long.
    """
    size = step * math.ceil(least / step) if step > 0 else least
    if size * _FEWEST > last - first:
        size = least
    count = max(1, math.ceil((last - first) / size - 1e-6))
    return [*(first + n * size for n in range(count)), last]


def time_in_bins(intervals: Iterable[tuple[float, float]], edges: Sequence[float]) -> list[float]:
    """Return how much of each bin the intervals cover, given their starts and ends."""
    found = [0.0] * (len(edges) - 1)
    for start, end in intervals:
        n = bisect_right(edges, start) - 1
        while n < len(found) and edges[n] < end:
            found[n] += min(end, edges[n + 1]) - max(start, edges[n])
            n += 1
    return found
